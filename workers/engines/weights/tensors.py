"""Between torch's tensors and bytes: the tensors of a model by name, their info, and views without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zbus.errors import ConfigError
from zbus.rl.weights import Bytes, TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["State", "as_tensor", "bytes_of", "check_dtype", "dtype_name", "dtype_of", "info_of", "keeps", "tensors_of"]

State = Mapping[str, "torch.Tensor"]

_FLOATS: Final = {"bfloat16": (8, 8), "float16": (5, 11), "float32": (8, 24), "float64": (11, 53)}
"""Bits of exponent and significand: what decides whether one holds all values of another."""


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, in the order of the model; shared ones once.

    The wrapping of DDP and of ``torch.compile`` leaves no trace in the names.
    """
    while (inner := getattr(model, "module", None)) is not None and type(model).__name__ == "DistributedDataParallel":
        model = inner
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and hasattr(tensor, "untyped_storage"):  # extra state of modules may be anything
            seen.add(id(tensor))
            found[name.replace("_orig_mod.", "")] = tensor
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the bare name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a bare name that a manifest has."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def check_dtype(name: str | None) -> None:
    """Refuse what weights cannot be cast to.

    Raises:
        ConfigError: It is none of the floating-point dtypes.
    """
    if name is not None and name not in _FLOATS:
        msg = f"weights cannot be cast to {name!r}"
        raise ConfigError(msg, hint=f"dtype is one of {', '.join(_FLOATS)}, or None to leave them as they are")


def keeps(holder: str, source: str) -> bool:
    """Tell whether values of dtype ``source`` survive a stay in dtype ``holder``."""
    if holder == source:
        return True
    wide, narrow = _FLOATS.get(holder), _FLOATS.get(source)
    return wide is not None and narrow is not None and wide[0] >= narrow[0] and wide[1] >= narrow[1]


def info_of(name: str, tensor: torch.Tensor, dtype: str | None = None) -> TensorInfo:
    """Return the info of a tensor, its whole shape where it is sharded; floating-point ones as cast to ``dtype``."""
    cast = dtype if dtype is not None and tensor.is_floating_point() else dtype_name(tensor.dtype)
    return TensorInfo(name, cast, tuple(tensor.shape))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor: a view where it is contiguous and on the CPU, else of a copy."""
    import torch

    dense = tensor.detach().cpu().contiguous()
    flat: Bytes = dense.reshape(-1).view(torch.uint8).numpy()
    return flat


def as_tensor(info: TensorInfo, data: Bytes) -> torch.Tensor:
    """Return a tensor over bytes without a copy; those of others, which are read-only, must not be written."""
    import torch

    if not info.nbytes:
        return torch.empty(info.shape, dtype=dtype_of(info.dtype))
    flat = torch.from_numpy(np.asarray(_Writable(data)))
    return flat.view(dtype_of(info.dtype)).reshape(info.shape)


class _Writable:
    """Bytes as torch takes them without a warning: it knows no read-only memory."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        address = data.__array_interface__["data"][0]
        self.__array_interface__: dict[str, Any] = {
            "version": 3, "shape": data.shape, "typestr": "|u1", "data": (address, False),
        }  # fmt: skip
