"""torch tensors, sizes, dtypes and devices. Imported with the first of them, never before.

A tensor arrives on the CPU, contiguous, detached, with its dtype and its bits. Storage shared between tensors, views,
strides and the gradient's graph do not travel; sparse, quantised, nested and meta tensors are refused.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from zbus.codec.arrays import shape_of
from zbus.codec.decoder import BUILD, Decoder, exactly
from zbus.codec.encoder import PREPARE, Encoder
from zbus.codec.wire import Kind, marker
from zbus.errors import CodecError

__all__ = ["install"]

_NAMES: Final = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_BY_NAME: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_BY_DTYPE: Final = {dtype: name for name, dtype in _BY_NAME.items()}

_DEVICES: Final = frozenset(
    {"cpu", "cuda", "meta", "mps", "xpu", "hpu", "xla", "npu", "mlu", "musa", "mtia", "ipu", "hip", "privateuseone"}
)
_TENSOR: Final = marker(Kind.TENSOR)
_SIZE: Final = marker(Kind.SIZE)
_DTYPE: Final = marker(Kind.TORCH_DTYPE)
_DEVICE: Final = marker(Kind.DEVICE)


def install() -> None:
    """Add torch's types to the tables of the codec; safe to repeat."""
    PREPARE[torch.Tensor] = PREPARE[torch.nn.Parameter] = _tensor
    PREPARE[torch.Size] = _size
    PREPARE[torch.dtype] = _dtype
    PREPARE[torch.device] = _device
    BUILD.update(
        {
            Kind.TENSOR: _build_tensor,
            Kind.SIZE: _build_size,
            Kind.TORCH_DTYPE: _build_dtype,
            Kind.DEVICE: _build_device,
        }
    )


def _refuse_special(value: torch.Tensor) -> None:
    """Refuse a tensor that is more than dense numbers."""
    what = ""
    if value.is_nested:
        what, hint = "nested", "send a list of tensors"
    elif value.is_quantized:
        what, hint = "quantised", "send value.int_repr() with its scale and zero point, or value.dequantize()"
    elif value.layout is not torch.strided:
        what, hint = f"sparse ({value.layout})", "send value.to_dense(), or indices and values as two tensors"
    elif value.device.type == "meta":
        what, hint = "meta (shape only)", "send tuple(value.shape) and value.dtype"
    if what:
        msg = f"a {what} tensor cannot be carried"
        raise CodecError(msg, hint=hint)


def _name(dtype: torch.dtype) -> str:
    name = _BY_DTYPE.get(dtype)
    if name is None:
        msg = f"{dtype} cannot be carried exactly"
        raise CodecError(msg, hint="convert with value.to(...)")
    return name


def _tensor(value: torch.Tensor, state: Encoder) -> list[Any]:
    _refuse_special(value)
    name = _name(value.dtype)
    operand: int | bytes = b""
    if value.numel():
        dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        operand = state.place(dense.reshape(-1).view(torch.uint8).numpy().data)
    return [_TENSOR, name, operand, *value.shape]


def _size(value: torch.Size, _state: Encoder) -> list[Any]:
    return [_SIZE, *value]


def _dtype(value: torch.dtype, _state: Encoder) -> list[Any]:
    return [_DTYPE, _name(value)]


def _device(value: torch.device, _state: Encoder) -> list[Any]:
    return [_DEVICE, value.type, value.index]


def _parse(name: Any) -> torch.dtype:
    dtype = _BY_NAME.get(name) if type(name) is str else None
    if dtype is None:
        msg = "a tensor came with an unknown dtype"
        raise CodecError(msg)
    return dtype


def _build_tensor(items: list[Any], state: Decoder) -> torch.Tensor:
    if len(items) < 2:  # dtype and operand
        msg = "a tensor came without dtype or data"
        raise CodecError(msg)
    dtype = _parse(items[0])
    shape = items[2:]
    nbytes = shape_of(shape, dtype.itemsize)
    data = state.view(items[1], nbytes, writable=True)  # torch knows no read-only memory
    flat = torch.frombuffer(data, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    if nbytes and flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)


def _build_size(items: list[Any], _state: Decoder) -> torch.Size:
    shape_of(items, 0)
    return torch.Size(items)


def _build_dtype(items: list[Any], _state: Decoder) -> torch.dtype:
    return _parse(exactly(items, str)[0])


def _build_device(items: list[Any], _state: Decoder) -> torch.device:
    kind, index = exactly(items, str, (int, type(None)))
    if kind not in _DEVICES or (index is not None and not 0 <= index < 128):  # torch's own bound
        msg = "an unknown torch device came"
        raise CodecError(msg)
    return torch.device(kind) if index is None else torch.device(kind, index)
