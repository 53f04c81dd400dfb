"""Bytes and seconds as text, in one form everywhere: three digits and a decimal unit."""

from __future__ import annotations

__all__ = ["nbytes_text", "number_text", "seconds_text"]

_BYTES = ("kB", "MB", "GB", "TB", "PB", "EB")
_NUMBERS = ("thousand", "million", "billion", "trillion", "quadrillion", "quintillion")


def nbytes_text(nbytes: float) -> str:
    """180 bytes, 12.6 MB (decimal: 1 MB is a million bytes)."""
    return f"{nbytes:g} bytes" if nbytes < 1000 else _scaled(nbytes, _BYTES)


def number_text(number: float) -> str:
    """812, 4.5 billion."""
    return f"{number:g}" if number < 1000 else _scaled(number, _NUMBERS)


def seconds_text(seconds: float) -> str:
    """0 us, < 1 us, 215 us, 1.3 ms, 12 s, 250 s."""
    if not seconds:
        return "0 us"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return "< 1 us"


def _scaled(size: float, units: tuple[str, ...]) -> str:
    size, unit = size / 1000, 0
    while size >= 999.5 and unit < len(units) - 1:
        size, unit = size / 1000, unit + 1
    return f"{_three(size)} {units[unit]}"


def _three(number: float) -> str:
    """Three digits, and no exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"
