"""Seeds of the answers to one prompt, alike wherever a workflow runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["mix", "sub_seed"]


def sub_seed(seed: int, number: int) -> int:
    """Return the seed of answer ``number`` to one prompt; that of answer 0 is ``seed`` itself."""
    if number == 0:
        return seed
    with np.errstate(over="ignore"):
        return int(mix(mix(np.array([seed % 2**64], np.uint64)) ^ np.uint64(number))[0] >> np.uint64(1))


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatter 64 bits: each bit of the result depends on all of the value (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))
