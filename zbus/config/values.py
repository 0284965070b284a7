"""Durations and sizes as people write them."""

from __future__ import annotations

import math
import re
from typing import Final

from zbus.errors import ConfigError

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size"]

_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_duration(value: object, what: str = "duration") -> float:
    """Return seconds.

    Args:
        value: A number of seconds, or text such as ``30``, ``250ms``, ``30s``, ``5m``, ``1h30m``.
        what: What the value is for, named in the error.

    Raises:
        ConfigError: Not a finite duration of zero or more.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value) and value >= 0:
            return float(value)
    elif isinstance(value, str):
        text = value.strip()
        if _NUMBER.fullmatch(text):
            return float(text)
        parts = _PART.findall(text)
        if parts and "".join(f"{n}{u}" for n, u in parts) == re.sub(r"\s+", "", text):
            return float(sum(float(number) * _SECONDS[unit] for number, unit in parts))
    msg = f"{what} {value!r} is not a duration"
    raise ConfigError(msg, hint="write seconds as a number, or 250ms, 30s, 5m, 1h30m")


def parse_size(value: object, what: str = "size") -> int:
    """Return bytes.

    Args:
        value: A whole number of bytes, or text such as ``4096``, ``64MiB``, ``1.5GB``.
        what: What the value is for, named in the error.

    Raises:
        ConfigError: Not a size of zero or more.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        factor = _BYTES.get(match[2].lower())
        if factor is not None:
            return int(match[1]) * factor if "." not in match[1] else round(float(match[1]) * factor)
    msg = f"{what} {value!r} is not a size"
    raise ConfigError(msg, hint="write bytes as a whole number, or 512KiB, 64MiB, 1.5GB")


def format_duration(seconds: float) -> str:
    """Return a short text for a person: ``0.9 s``, ``41 s``, ``4m11s``, ``2h05m``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.09995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def format_size(size: int) -> str:
    """Return a short text for a person in powers of 1024: ``512 B``, ``64 MiB``, ``1.9 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
