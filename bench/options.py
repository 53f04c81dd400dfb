"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["read_sizes"]

_UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def read_sizes(_: Any, __: Any, text: str) -> list[int]:
    """`64KiB,1MiB` as bytes."""
    found = []
    for word in text.split(","):
        number = word.strip().upper()
        unit = next((unit for unit in _UNITS if number.endswith(unit)), "")
        try:
            found.append(int(float(number.removesuffix(unit)) * _UNITS.get(unit, 1)))
        except ValueError:
            raise click.BadParameter(f"{word!r} is no size such as 64KiB, 1MiB or 4096") from None
        if not 1 << 10 <= found[-1] <= 1 << 30:
            raise click.BadParameter(f"{word!r} is not between 1KiB and 1GiB")
    return found
