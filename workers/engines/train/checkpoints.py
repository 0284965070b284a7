"""Checkpoints of a trainer: all of its state in torch's distributed format, or the model alone as safetensors.

A ``checkpoint`` may be loaded on another number of ranks; only the generators' states then start anew. Torch's format
has a pickled index: load only what you wrote.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from workers.engines.train.parallel import is_sharded
from zbus.errors import ConfigError

if TYPE_CHECKING:
    from workers.engines.train.trainer import Trainer

__all__ = ["load", "save"]

_FORMAT: Final = 1
_HEAD: Final = "trainer.json"
_MODEL: Final = "model.safetensors"
_STATE: Final = "optimizer.state."
_KINDS: Final = ("checkpoint", "model")


def save(trainer: Trainer, path: str, kind: str, version: int) -> dict[str, Any]:
    """Write this rank's part. Collective.

    Returns:
        ``path``, ``kind`` and ``nbytes`` of what this rank wrote beside the common files.

    Raises:
        ConfigError: The kind is not known.
        OSError: The directory cannot be written, or its parent is not there.
    """
    _check_kind(kind)
    folder = Path(path)
    folder.mkdir(exist_ok=True)  # without parents: a call that was given up has its own removed
    if kind == "model":
        return {"path": path, "kind": kind, "nbytes": _save_model(trainer, folder)}
    state = {"model": get_model_state_dict(trainer.model)}
    if trainer.optimizer.state:  # torch would make up a state where there is none yet, and the optimizer keep it
        state["optimizer"] = get_optimizer_state_dict(trainer.model, trainer.optimizer)
    dcp.save(state, checkpoint_id=folder)
    nbytes = _save_generators(folder / f"generators.{trainer.place.rank}.npz")
    if trainer.place.rank == 0:
        head = {
            "format": _FORMAT, "world": trainer.place.world, "steps": trainer.steps, "position": trainer.position,
            "version": version,
        }  # fmt: skip
        _write(folder / _HEAD, json.dumps(head).encode())
    return {"path": path, "kind": kind, "nbytes": nbytes}


def load(trainer: Trainer, path: str, kind: str) -> dict[str, Any]:
    """Take this rank's part over. Collective.

    Returns:
        ``path`` and ``kind``; of a checkpoint ``steps``, ``position``, ``version`` and ``generators``: whether their
        states were taken over, too.

    Raises:
        ConfigError: The kind is not known, or there is no such checkpoint or not all of it; nothing was changed.
        ValueError: It is not one of this model; nothing was changed.
    """
    _check_kind(kind)
    folder = Path(path)
    if kind == "model":
        _load_model(trainer, folder / _MODEL if folder.is_dir() else folder)
        return {"path": path, "kind": kind}
    head = _read_head(folder)
    same = head["world"] == trainer.place.world
    _check_files(folder, trainer.place.world if same else 0)
    model = get_model_state_dict(trainer.model)
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    _check_tensors(folder, stored, model)
    trainer.zero_grad()
    _load_state(trainer, folder, model, {name.removeprefix(_STATE) for name in stored if name.startswith(_STATE)})
    trainer.steps = head["steps"]
    trainer.move_to(head["position"])
    if same:
        _load_generators(folder / f"generators.{trainer.place.rank}.npz")
    return {
        "path": path, "kind": kind, "steps": trainer.steps, "position": trainer.position, "version": head["version"],
        "generators": same,
    }  # fmt: skip


def _load_state(trainer: Trainer, folder: Path, model: dict[str, Any], kept: set[str]) -> None:
    """Take over model and optimizer. ``kept``: names of the optimizer's tensors, each after its parameter's."""
    optimizer = trainer.optimizer
    optimizer.state.clear()
    if not kept:
        dcp.load({"model": model}, checkpoint_id=folder)
        set_model_state_dict(trainer.model, model)
        return
    # Torch makes a state for every parameter here, and the optimizer had one only where a gradient ever came.
    state = get_optimizer_state_dict(trainer.model, optimizer)
    blank = [name for name, own in state["state"].items() if not any(f"{name}.{key}" in kept for key in own)]
    there = {name: own for name, own in state["state"].items() if name not in blank}
    wanted = {"model": model, "optimizer": {**state, "state": there}}
    dcp.load(wanted, checkpoint_id=folder)
    set_model_state_dict(trainer.model, model)
    set_optimizer_state_dict(trainer.model, optimizer, state)
    parameters = dict(trainer.model.named_parameters(remove_duplicate=False))
    for name in blank:
        optimizer.state.pop(parameters[name], None)


def _full_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all weights by name on the CPU, on rank 0; an empty dict on others. Collective where they are sharded."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    sharded = any(map(is_sharded, trainer.model.parameters()))
    state = get_model_state_dict(trainer.model, options=options) if sharded else trainer.model.state_dict()
    return {} if trainer.place.rank else {name: tensor.detach().cpu() for name, tensor in state.items()}


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        msg = f"kind={kind!r} of a checkpoint is not known"
        raise ConfigError(msg, hint=f"one of {', '.join(_KINDS)}")


# -- the model alone -------------------------------------------------------------------------------------------------


def _save_model(trainer: Trainer, folder: Path) -> int:
    state = _full_state(trainer)
    if trainer.place.rank:
        return 0
    tensors = {name: tensor.clone().contiguous() for name, tensor in state.items()}  # tied weights share memory
    save_file(tensors, folder / _MODEL, metadata={"format": "pt"})
    config = getattr(trainer.model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def _load_model(trainer: Trainer, file: Path) -> None:
    if not file.is_file():
        msg = f"there is no model at {str(file)!r}"
        raise ConfigError(msg, hint=f"give a directory with {_MODEL}, or a .safetensors file")
    stored = load_file(file)
    wanted = {name: tuple(tensor.shape) for name, tensor in trainer.model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if wanted != found:
        raise ValueError(_difference(str(file), wanted, found))
    set_model_state_dict(trainer.model, stored, options=StateDictOptions(full_state_dict=True))


def _difference(path: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    told = [f"no {name}" for name in wanted if name not in found]
    told += [f"unknown {name}" for name in found if name not in wanted]
    told += [f"{n} {found[n]}, not {shape}" for n, shape in wanted.items() if n in found and found[n] != shape]
    more = f" and {len(told) - 3} more" if len(told) > 3 else ""
    return f"{path} does not hold this model: {', '.join(told[:3])}{more}"


# -- all of the state ------------------------------------------------------------------------------------------------


def _read_head(folder: Path) -> dict[str, Any]:
    try:
        head = json.loads((folder / _HEAD).read_bytes())
    except FileNotFoundError:
        msg = f"there is no checkpoint at {str(folder)!r}: it has no {_HEAD}"
        raise ConfigError(msg, hint="give the directory that save() wrote") from None
    except ValueError as error:
        msg = f"the checkpoint at {str(folder)!r} is damaged: {_HEAD}: {error}"
        raise ConfigError(msg, hint="load an older one") from error
    whole = isinstance(head, dict) and all(
        type(head.get(key)) is int for key in ("world", "steps", "position", "version")
    )
    if not whole or head.get("format") != _FORMAT:
        msg = f"the checkpoint at {str(folder)!r} is not of format {_FORMAT}"
        raise ConfigError(msg, hint="load it with the version of zbus that wrote it")
    found: dict[str, Any] = head
    return found


def _check_files(folder: Path, world: int) -> None:
    """Look for the files of all ranks on each, so that none goes on alone."""
    for name in (".metadata", *(f"generators.{rank}.npz" for rank in range(world))):
        if not (folder / name).is_file():
            msg = f"the checkpoint at {str(folder)!r} is damaged: it has no {name}"
            raise ConfigError(msg, hint="load an older one")


def _check_tensors(folder: Path, stored: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    found = {
        name.removeprefix("model."): tuple(entry.size) for name, entry in stored.items()
        if name.startswith("model.") and hasattr(entry, "size")
    }  # fmt: skip
    wanted = {name: tuple(tensor.shape) for name, tensor in model.items() if hasattr(tensor, "shape")}
    if wanted != found:
        raise ValueError(_difference(str(folder), wanted, found))


def _save_generators(file: Path) -> int:
    version, numbers, gauss = random.getstate()
    name, keys, at, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  # user code may draw from it
    arrays = {
        "torch": torch.get_rng_state().numpy(),
        "python": np.array(numbers, np.uint64),
        "python_rest": np.array([version, np.nan if gauss is None else gauss]),
        "numpy": np.asarray(keys),
        "numpy_rest": np.array([at, has_gauss, cached]),
    }
    assert name == "MT19937", "numpy's global generator has no other"  # noqa: S101  # else its state has another form
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        arrays["cuda"] = torch.cuda.get_rng_state().numpy()
    with file.open("wb") as out:
        np.savez(out, **arrays)
    return file.stat().st_size


def _load_generators(file: Path) -> None:
    with np.load(file, allow_pickle=False) as stored:
        arrays = dict(stored)
    torch.set_rng_state(torch.from_numpy(arrays["torch"]))
    version, gauss = arrays["python_rest"]
    numbers = tuple(int(number) for number in arrays["python"])
    random.setstate((int(version), numbers, None if np.isnan(gauss) else float(gauss)))
    at, has_gauss, cached = arrays["numpy_rest"]
    np.random.set_state(("MT19937", arrays["numpy"], int(at), int(has_gauss), float(cached)))  # noqa: NPY002  # as saved
    if "cuda" in arrays and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(arrays["cuda"]))


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
