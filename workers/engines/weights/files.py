"""Weights as a directory of safetensors: written beside its place and renamed, so that it is there whole or not at all.

A directory is never written again: a reader may have it mapped, and would see new bytes under its tensors.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from workers.engines.weights.tensors import as_tensor
from zbus.config import sync_to_disk
from zbus.errors import ConfigError
from zbus.rl.weights import Bytes, Manifest, TensorInfo, manifest_of, views

if TYPE_CHECKING:
    import torch

__all__ = ["FILE", "Files", "save"]

FILE: Final = "model.safetensors"
_PART: Final = ".part-"
_FULL: Final = "zbus.full"
_DIGEST: Final = "zbus.digest"


def save(path: Path, manifest: Manifest, data: Bytes, *, digest: str, full: bool) -> int:
    """Write a directory with one file of safetensors, and what makes it survive a power cut; return its bytes.

    Raises:
        ConfigError: The directory is there already and not empty.
        OSError: It cannot be written; nothing is left of it.
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}{_PART}{secrets.token_hex(4)}")
    part.mkdir()
    try:
        file = part / FILE
        tensors = {info.name: as_tensor(info, view) for info, view in views(manifest, data)}
        save_file(tensors, file, {"format": "pt", _FULL: str(full).lower(), _DIGEST: digest})
        nbytes = file.stat().st_size
        sync_to_disk(file)
        sync_to_disk(part)
        try:
            part.rename(path)
        except OSError as error:
            if not path.exists():
                raise
            msg = f"weights directory {str(path)!r} is there already, and is never written again"
            raise ConfigError(msg, hint="name a new directory for each version") from error
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return nbytes


@dataclass(frozen=True)
class Files:
    """The safetensors of one directory, opened and described; their bytes are read with ``tensors``.

    Attributes:
        manifest: All tensors.
        full: Whether it claims to hold all of a model; any but our own do.
    """

    manifest: Manifest
    full: bool
    _opened: tuple[tuple[Any, tuple[TensorInfo, ...]], ...]

    @classmethod
    def open(cls, path: Path) -> Files:
        """Open all files of a directory.

        Raises:
            ConfigError: There are none, or one is damaged.
        """
        from safetensors import SafetensorError, safe_open

        names = sorted(path.glob("*.safetensors"))
        if not names:
            msg = f"weights directory {str(path)!r} holds no file *.safetensors"
            raise ConfigError(msg, hint="all ranks must see the directory under this path: use a shared file system")
        opened: list[tuple[Any, tuple[TensorInfo, ...]]] = []
        full = True
        for file in names:
            try:
                handle: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                msg = f"weights file {str(file)!r} is damaged: {error}"
                raise ConfigError(msg, hint="publish the weights anew") from error
            told = handle.metadata() or {}
            full = full and told.get(_FULL, "true") == "true"
            opened.append((handle, tuple(_info(handle, name) for name in handle.keys())))  # noqa: SIM118  # no mapping
        return cls(manifest_of(info for _, infos in opened for info in infos), full, tuple(opened))

    def tensors(self) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
        """Yield each tensor, mapped from its file."""
        for handle, infos in self._opened:
            for info in infos:
                yield info, handle.get_tensor(info.name)


def _info(handle: Any, name: str) -> TensorInfo:
    part = handle.get_slice(name)
    return TensorInfo(name, _DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))


_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
