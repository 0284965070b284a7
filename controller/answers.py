"""What kind of value an answer is, without importing its library; the error when answers do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zbus.errors import ConfigError
from zbus.ragged import Ragged

__all__ = ["CollectError", "Empty", "kind_of", "library_of", "require_same_keys", "short"]

Empty = Callable[[Sequence[int], Any], Any]
"""Makes an uninitialised numpy array of a shape and a dtype."""


class CollectError(ConfigError, ValueError):
    """The ranks did their work, but their answers cannot be merged as declared.

    Attributes:
        results: Every answer by rank, so that no work is lost.
    """

    def __init__(self, message: str, *, hint: str | None = None, results: Mapping[int, Any] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.results = dict(results or {})


def short(value: Any, limit: int = 60) -> str:
    """Return a value's text on one line of at most so many characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # a repr of the user's that raises must not hide the message
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def require_same_keys(parts: Sequence[dict[Any, Any]], ranks: Sequence[int], cannot: str) -> None:
    """Refuse dicts of several ranks whose keys differ.

    Args:
        parts: One dict of each rank.
        ranks: Whose they are.
        cannot: What they are refused for, as the error begins: "Concat cannot join dicts".

    Raises:
        CollectError: Some rank has other keys than the first.
    """
    for rank, part in zip(ranks, parts, strict=True):
        if part.keys() != parts[0].keys():
            odd = ", ".join(repr(key) for key in part.keys() ^ parts[0].keys())
            msg = f"{cannot}: the keys of rank {rank} differ from those of rank {ranks[0]}: {odd}"
            raise CollectError(msg)


def kind_of(value: Any) -> str:
    """Return what holds the items of a value ("list", "tuple", "dict", "ragged", a library), or "none", or "other"."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "dict"
    if isinstance(value, Ragged):
        return "ragged"
    if isinstance(value, list):
        return "list"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "tuple"
    library = library_of(value)
    return library if library and len(value.shape) else "other"


def library_of(value: Any) -> str:
    """Return "numpy" or "torch" for their arrays, else nothing, without importing either."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return ""
    home = type(value).__module__.partition(".")[0]
    if home in ("numpy", "torch"):
        return home
    return "torch" if hasattr(value, "requires_grad") else "numpy"
