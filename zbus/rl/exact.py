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
"""Fractions are added in two halves, so that 2**36 of them cannot overflow an int64."""
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
        fractions, exponents = np.frexp(values.ravel())
        whole = np.ldexp(fractions, _DIGITS).astype(np.int64)
        powers, places = np.unique(exponents, return_inverse=True)
        high, low = np.zeros((2, len(powers)), np.int64)
        np.add.at(high, places, whole >> _LOW)
        np.add.at(low, places, whole & ((1 << _LOW) - 1))
        if not len(powers):
            return cls()
        least = int(powers[0])
        total = 0
        for power, upper, lower in zip(powers.tolist(), high.tolist(), low.tolist(), strict=True):
            total += ((upper << _LOW) + lower) << (power - least)
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
        least = min(self.exponent, other.exponent)
        return Exact._reduced(
            (self.numerator << (self.exponent - least)) + (other.numerator << (other.exponent - least)), least
        )

    def over(self, count: int = 1) -> float:
        """Return the float nearest to it divided by ``count``; an infinity where no float is that large."""
        shift = self.exponent
        above, below = (self.numerator << shift, count) if shift >= 0 else (self.numerator, count << -shift)
        try:
            return above / below  # of two integers: rounded once, from the exact quotient
        except OverflowError:
            return math.copysign(math.inf, above)
