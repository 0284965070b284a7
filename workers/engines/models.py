"""Models as the arguments of a role name them: a factory by path, or a directory of a Hugging Face causal model.

::

    model: model.py:G2P
    model: {factory: "model.py:G2P", kwargs: {width: 96}}
    model: {hf: /models/tiny}

Torch is imported where a model is built, so that a driver can check its roles without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zbus.errors import ConfigError
from zbus.runtime.loader import load_object

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["build_model", "check_model", "dtype_of", "logits_of"]

_HINT: Final = 'give "file.py:factory", {"factory": "file.py:factory", "kwargs": {...}} or {"hf": "/model/directory"}'
_KEYS: Final = (frozenset({"factory", "kwargs"}), frozenset({"hf", "kwargs"}))


def check_model(spec: Any) -> None:
    """Refuse what names no model; nothing is loaded.

    Raises:
        ConfigError: It says why.
    """
    if isinstance(spec, str) and ":" in spec:
        return
    if not isinstance(spec, Mapping):
        msg = f"model {spec!r} names no factory"
        raise ConfigError(msg, hint=_HINT)
    known = next((keys for keys in _KEYS if spec.keys() <= keys and spec.keys() - {"kwargs"}), None)
    if known is None:
        msg = f"model with the keys {', '.join(map(repr, spec)) or 'none'} names no factory"
        raise ConfigError(msg, hint=_HINT)
    if not isinstance(spec.get("kwargs", {}), Mapping):
        msg = f"kwargs of the model are {spec['kwargs']!r}, not names with values"
        raise ConfigError(msg, hint=_HINT)


def build_model(spec: str | Mapping[str, Any], *, dtype: str | None = None, device: str = "cpu") -> nn.Module:
    """Build a model; a Hugging Face one comes with the weights of its directory.

    Args:
        spec: As ``check_model`` takes it.
        dtype: Name of a torch dtype that its floating-point weights get; None keeps the factory's.
        device: Where it goes.

    Raises:
        ConfigError: It names no model, no directory, or transformers is not installed.
        EngineLoadError: The factory cannot be imported.
        TypeError: The factory made something else. What the factory itself raises passes through.
    """
    from torch import nn

    check_model(spec)
    told: Mapping[str, Any] = {"factory": spec} if isinstance(spec, str) else spec
    kwargs = dict(told.get("kwargs", {}))
    if "hf" in told:
        model = _from_directory(Path(told["hf"]), kwargs)
    else:
        model = load_object(told["factory"], "model")(**kwargs)
    if not isinstance(model, nn.Module):
        msg = f"model {told.get('factory')!r} made a {type(model).__name__}, not a torch.nn.Module"
        raise TypeError(msg)
    return model.to(device) if dtype is None else model.to(device, dtype_of(dtype))


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name such as ``float32``.

    Raises:
        ConfigError: There is none.
    """
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        msg = f"dtype {name!r} is none of torch's"
        raise ConfigError(msg, hint="float32, bfloat16, float64, …")
    return found


def logits_of(output: Any) -> Any:
    """Return the logits ``[rows, length, vocabulary]`` out of what a model answered: these, or an object with them."""
    return getattr(output, "logits", output)


def _from_directory(path: Path, kwargs: dict[str, Any]) -> Any:
    if not (path / "config.json").is_file():
        msg = f"model directory {str(path)!r} has no config.json"
        raise ConfigError(msg, hint="give a directory that save_pretrained wrote; nothing is downloaded")
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        msg = f"model directory {str(path)!r} needs transformers, which is not installed here"
        raise ConfigError(msg, hint="pip install 'zbus-runtime[hf]' where the workers run") from error
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **kwargs)
