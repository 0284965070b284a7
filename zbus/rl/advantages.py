"""Advantages of answers among the other answers to the same prompt. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zbus.errors import ConfigError

__all__ = ["group_advantages"]


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike | int, *, scale: bool = True, epsilon: float = 1e-6
) -> npt.NDArray[np.float32]:
    """Return each answer's reward less the mean of its group: how much better it is than its siblings.

    Group-relative advantages of GRPO (Shao et al., "DeepSeekMath", 2024, section 4.1). A group of one, or one whose
    rewards are all alike, teaches nothing: its advantages are 0.

    Args:
        rewards: One finite number per answer, ``[n]``.
        groups: The group of each answer, ``[n]`` (any values; equal ones belong together, wherever they stand), or the
            size of consecutive groups.
        scale: Divide by the standard deviation within the group; False: only centre (Liu et al., "Understanding
            R1-Zero-like training", 2025, argue that the division favours prompts that are very easy or very hard).
        epsilon: Added to the standard deviation.

    Returns:
        float32 ``[n]``, in the order of ``rewards``.

    Raises:
        ConfigError: The groups do not fit the rewards, or a reward is not finite.
    """
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1:
        msg = f"rewards have shape {values.shape}, not one number per answer"
        raise ConfigError(msg)
    if not np.isfinite(values).all():
        place = int(np.argmin(np.isfinite(values)))
        msg = f"reward {place} is {values[place]}"
        raise ConfigError(msg, hint="a reward that cannot be given belongs to a rejected episode, not into a batch")
    if isinstance(groups, int):
        if groups < 1 or len(values) % groups:
            msg = f"{len(values)} rewards do not make groups of {groups}"
            raise ConfigError(msg)
        number = np.arange(len(values)) // groups
    else:
        named = np.asarray(groups)
        if named.shape != values.shape:
            msg = f"{len(values)} rewards, but groups have shape {named.shape}"
            raise ConfigError(msg)
        number = np.unique(named, return_inverse=True)[1]
    count = np.bincount(number)
    centred = values - (np.bincount(number, values) / count)[number]
    if not scale:
        return centred.astype(np.float32)
    deviation = np.sqrt(np.bincount(number, centred**2) / count)
    return (centred / (deviation + epsilon)[number]).astype(np.float32)
