"""One colour per block, by the first rank that holds it, so that a rank keeps it across pictures.

Colours have equal lightness and hues in the order of ranks, from blue to red: neighbours differ,
and none stands out. They are even steps in OKLCH (Björn Ottosson, "A perceptual color space for
image processing", 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["Colours"]


class Colours:
    """The colours of blocks, each named by a rank.

    Args:
        ranks: one of each block that is drawn, in all pictures that belong together.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        ordered = sorted(set(ranks))
        self._hues = {rank: 235 - 300 * number / len(ordered)
                      for number, rank in enumerate(ordered)}

    def ground(self, rank: int) -> str:
        """The colour of a block, `#rrggbb`; dark text can be read on it."""
        return _colour(0.87, 0.075, self._hues[rank])

    def shade(self, rank: int) -> str:
        """A darker one, for hatching."""
        return _colour(0.74, 0.085, self._hues[rank])


def _colour(lightness: float, chroma: float, degrees: float) -> str:
    hue = math.radians(degrees)
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long, medium, short = (
        (lightness + x * a + y * b) ** 3
        for x, y in ((0.3963377774, 0.2158037573), (-0.1055613458, -0.0638541728),
                     (-0.0894841775, -1.2914855480))
    )
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(x, 0.0), 1.0))):02x}" for x in linear)


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
