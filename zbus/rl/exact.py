"""Sums of float64 numbers without any rounding, so that the order and the number of parts change nothing.

Every finite float is an integer times a power of two; so is every sum of them, with a longer integer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

__all__ = ["Exact"]

_DIGITS: Final = 53
"""Bits of a float's fraction."""
_LOW: Final = 26
"""Fractions are added in two halves, of so many bits and of the rest."""
_AT_ONCE: Final = 1 << 25
"""So many halves add up to less than 2**53."""
_EXPONENTS: Final = range(-1200, 1200)
"""Beyond what any float has."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The number ``numerator * 2**exponent``; the numerator is odd, or both are 0, so equal numbers are equal."""

    numerator: int = 0
    exponent: int = 0

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Self:
        """Return the sum of finite numbers, of any shape."""
        flat = values.ravel()
        total = cls()
        for begin in range(0, flat.size, _AT_ONCE):
            total = total._plus(cls._of_some(flat[begin : begin + _AT_ONCE]))
        return total

    @classmethod
    def of_one(cls, value: float) -> Self:
        """Return a finite number."""
        fraction, exponent = math.frexp(value)
        return cls._reduced(int(math.ldexp(fraction, _DIGITS)), exponent - _DIGITS)

    @classmethod
    def _of_some(cls, values: npt.NDArray[np.float64]) -> Self:
        """Add up what has one exponent, then all exponents."""
        fractions, exponents = np.frexp(values)
        least = int(exponents.min())
        places = exponents - least
        whole = np.ldexp(fractions, _DIGITS).astype(np.int64)
        # Floats, but every partial sum of such halves is an integer that a float holds.
        high = np.bincount(places, (whole >> _LOW).astype(np.float64))
        low = np.bincount(places, (whole & ((1 << _LOW) - 1)).astype(np.float64))
        total = 0
        for place in np.flatnonzero((high != 0) | (low != 0)).tolist():
            total += ((int(high[place]) << _LOW) + int(low[place])) << place
        return cls._reduced(total, least - _DIGITS)

    @classmethod
    def of_pair(cls, pair: Any) -> Self:
        """Return the number that ``pair`` was written from.

        Raises:
            ValueError: It is no such pair.
        """
        if isinstance(pair, list | tuple) and len(pair) == 2:
            numerator, exponent = pair
            if type(numerator) is int and type(exponent) is int and exponent in _EXPONENTS:
                return cls._reduced(numerator, exponent)
        msg = f"{pair!r} is not an exact sum: an integer and the power of two it is multiplied by"
        raise ValueError(msg)

    @classmethod
    def _reduced(cls, numerator: int, exponent: int) -> Self:
        if not numerator:
            return cls()
        zeros = (numerator & -numerator).bit_length() - 1
        return cls(numerator >> zeros, exponent + zeros)

    def pair(self) -> list[int]:
        """Return it as plain data."""
        return [self.numerator, self.exponent]

    def __add__(self, other: Exact) -> Exact:
        return self._plus(other)

    def _plus(self, other: Exact) -> Self:
        least = min(self.exponent, other.exponent)
        return self._reduced(
            (self.numerator << (self.exponent - least)) + (other.numerator << (other.exponent - least)), least
        )

    def over(self, count: int = 1) -> float:
        """Return the float nearest to it divided by ``count``; an infinity where no float is that large."""
        shift = self.exponent
        above, below = (self.numerator << shift, count) if shift >= 0 else (self.numerator, count << -shift)
        try:
            return above / below  # of two integers: rounded once, from the exact quotient
        except OverflowError:
            return math.inf if above > 0 else -math.inf  # which is not to be made a float either
