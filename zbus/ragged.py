"""Sequences of different length in one array, without padding: one piece of memory to send, to split and to join.

Sequence ``i`` is ``values[offsets[i]:offsets[i + 1]]``. numpy and torch are imported only where one of theirs is at
hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from zbus.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Ragged", "entries_of"]


class Ragged:
    """Sequences of different length.

    ``len`` is their number; iterating and ``[i]`` give each as a view, a slice or a list of numbers another ``Ragged``.
    As an argument it is split by sequences, as an answer it is joined by them; under ``Split(by="tokens")`` the tokens
    of a sequence are its entries.

    Attributes:
        values: Array or tensor ``[entries, ...]``: all sequences, one behind the other.
        offsets: int64 array ``[sequences + 1]``: where each begins, and the end.

    Raises:
        ConfigError: The offsets do not cut the values into sequences.
    """

    __slots__ = ("offsets", "values")

    values: Any
    offsets: np.ndarray[Any, Any]

    def __init__(self, values: Any, offsets: Any) -> None:
        import numpy as np

        cuts = np.asarray(offsets)
        if not len(getattr(values, "shape", ())):
            msg = f"the values of a Ragged are an array or a tensor with entries, not {type(values).__name__}"
            raise ConfigError(msg, hint="zbus.Ragged.of([...]) makes one out of a list of sequences")
        if cuts.ndim != 1 or not len(cuts) or cuts.dtype.kind not in "iu":
            msg = f"the offsets of a Ragged are whole numbers in one dimension, not {cuts.dtype} {cuts.shape}"
            raise ConfigError(msg)
        cuts = cuts.astype(np.int64, copy=False)
        if cuts[0] != 0 or cuts[-1] != len(values) or (cuts[1:] < cuts[:-1]).any():
            msg = f"the offsets of a Ragged rise from 0 to the {len(values)} entries it holds; these do not"
            raise ConfigError(msg)
        self.values, self.offsets = values, cuts

    @classmethod
    def of(cls, sequences: Sequence[Any]) -> Ragged:
        """Return a list of sequences as one: arrays, tensors (all of one kind) or lists of numbers. They are copied.

        Raises:
            ConfigError: There is none, so nothing tells the dtype.
        """
        import numpy as np

        if not sequences:
            msg = "a Ragged of no sequences has no dtype"
            raise ConfigError(msg, hint="write zbus.Ragged(numpy.empty(0, dtype), [0])")
        if hasattr(sequences[0], "requires_grad"):
            import torch

            return cls(torch.cat(list(sequences)), _cuts([len(one) for one in sequences]))
        arrays = [np.asarray(one) for one in sequences]
        full = [array for array in arrays if len(array)] or arrays  # an empty list has a dtype that means nothing
        return cls(np.concatenate(full), _cuts([len(array) for array in arrays]))

    def __repr__(self) -> str:
        return f"<Ragged: {len(self)} sequences, {len(self.values)} entries of {self.values.dtype}>"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    @overload
    def __getitem__(self, which: int) -> Any: ...
    @overload
    def __getitem__(self, which: slice | Sequence[int]) -> Ragged: ...
    def __getitem__(self, which: int | slice | Sequence[int]) -> Any:
        if isinstance(which, slice) and which.step in (None, 1):
            begin, end, _ = which.indices(len(self))
            cuts = self.offsets[begin : max(begin, end) + 1]
            return Ragged(self.values[int(cuts[0]) : int(cuts[-1])], cuts - cuts[0])
        if isinstance(which, slice):
            return self.take(range(*which.indices(len(self))))
        if hasattr(which, "__index__"):
            number = range(len(self))[which]
            return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]
        return self.take(which)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Number of entries of each sequence: int64 ``[sequences]``."""
        lengths: np.ndarray[Any, Any] = self.offsets[1:] - self.offsets[:-1]
        return lengths

    def take(self, which: Sequence[int], empty: Callable[[Sequence[int], Any], Any] | None = None) -> Ragged:
        """Return some sequences, in the order given, copied once.

        Args:
            which: Their numbers.
            empty: Makes the array they are copied to, from shape and dtype; None: fresh memory. Not used for tensors.
        """
        entries = entries_of(self.offsets, which)
        cuts = _cuts(self.lengths[list(which)])
        if hasattr(self.values, "requires_grad"):
            return Ragged(self.values[entries], cuts)
        made = None if empty is None else empty((len(entries), *self.values.shape[1:]), self.values.dtype)
        return Ragged(self.values.take(entries, 0, made, "clip"), cuts)  # "raise" would copy twice

    def padded(self, fill: Any = 0) -> Any:
        """Return a rectangle ``[sequences, longest, ...]`` with ``fill`` behind the end of each sequence."""
        import numpy as np

        longest = int(self.lengths.max(initial=0))
        shape = (len(self), longest, *self.values.shape[1:])
        if hasattr(self.values, "requires_grad"):
            made = self.values.new_full(shape, fill)
        else:
            made = np.full(shape, fill, self.values.dtype)
        made[np.arange(longest) < self.lengths[:, None]] = self.values
        return made


def _cuts(lengths: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    cuts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=cuts[1:])
    return cuts


def entries_of(offsets: np.ndarray[Any, Any], which: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the places of all entries of some sequences, in the order given."""
    import numpy as np

    rows = np.asarray(which, np.int64)
    begins = offsets[:-1][rows]
    lengths = offsets[1:][rows] - begins
    cuts = _cuts(lengths)
    places: np.ndarray[Any, Any] = np.arange(int(cuts[-1])) + np.repeat(begins - cuts[:-1], lengths)
    return places
