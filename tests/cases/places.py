"""Results whose elements come from places that are known without data: borders, windows and
repeats."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases import Case, case, integers, reals

_OF_ONE = (
    *((f"pad_{mode}", (3, 7), lambda a, mode=mode: F.pad(a, (2, 3), mode=mode))
      for mode in ("reflect", "replicate", "circular")),
    *((f"pad_{mode}_long", (2, 2, 9), lambda a, mode=mode: F.pad(a, (8, 1), mode=mode))
      for mode in ("reflect", "replicate", "circular")),
    *((f"pad_{mode}_two", (2, 3, 5, 6), lambda a, mode=mode: F.pad(a, (2, 0, 1, 3), mode=mode))
      for mode in ("reflect", "replicate", "circular")),
    # What one end loses the other may gain.
    *((f"pad_{mode}_{name}", (2, 3, 4, 6), lambda a, mode=mode, pad=pad: F.pad(a, pad, mode=mode))
      for mode in ("reflect", "replicate", "circular")
      for name, pad in (("shifted", (-2, 2, 0, 0)), ("back", (3, -1, 0, 0)),
                        ("cropped", (0, 0, -1, -2)), ("turned", (-1, 1, -2, 1)))),
    ("pad_three", (2, 2, 3, 4, 5), lambda a: F.pad(a, (1, 1, 0, 2, 2, 1), mode="circular")),
    ("pad_far", (2, 5), lambda a: F.pad(a, (9, 7), mode="replicate")),
    ("unfold_line", (9,), lambda a: a.unfold(0, 3, 1) * 1),
    ("unfold_rows", (9, 3), lambda a: a.unfold(0, 4, 2) * 1),
    ("unfold_apart", (3, 11), lambda a: a.unfold(1, 2, 4) * 1),
    ("unfold_middle", (2, 7, 3), lambda a: a.unfold(1, 7, 1) * 1),
    ("unfold_columns", (3, 7), lambda a: torch.unfold_copy(a, -1, 3, 2)),
    ("unfold_mean", (11, 2), lambda a: a.unfold(0, 3, 1).mean(-1)),
    ("repeat_rows", (5, 3), lambda a: a.repeat(3, 1)),
    ("repeat_both", (5, 3), lambda a: a.repeat(2, 2)),
    ("repeat_in_front", (5, 3), lambda a: a.repeat(2, 3, 1)),
    ("repeat_nothing", (5, 3), lambda a: a.repeat(0, 1)),
    ("tile_line", (5, 3), lambda a: torch.tile(a, (2,))),
    ("tile_in_front", (5,), lambda a: a.tile((2, 3))),
    ("fliplr", (5, 4), torch.fliplr), ("flipud", (5, 4), torch.flipud),
    ("combinations", (6,), torch.combinations),
    ("combinations_again", (5,), lambda a: torch.combinations(a, 3, True)),
    ("channel_shuffle", (2, 6, 3), lambda a: F.channel_shuffle(a, 3)),
    ("pixel_shuffle", (3, 12, 3, 2), lambda a: F.pixel_shuffle(a, 2)),
    ("pixel_unshuffle", (3, 2, 6, 4), lambda a: F.pixel_unshuffle(a, 2)),
)

CASES: list[Case] = [
    case(name, fn, reals(*shape), per_mesh=4) for name, shape, fn in _OF_ONE
] + [
    case("repeat_int", lambda a: a.repeat(2), integers(7), grad=False),
    case("unfold_int32", lambda a: a.unfold(0, 3, 2) + 1, integers(8, dtype=torch.int32),
         grad=False),
    case("native_channel_shuffle", lambda a: torch.native_channel_shuffle(a, 2),
         reals(3, 8, 2, 2), grad=False),
    # Rows that are named often come once.
    case("index_often", lambda a, i: a[i], reals(5, 3), integers(11, high=5), per_mesh=8),
    case("select_often", lambda a, i: a.index_select(1, i), reals(3, 5), integers(9, high=5),
         per_mesh=8),
    case("gather_often", lambda a, i: a.gather(0, i), reals(4, 3), integers(9, 3, high=4),
         per_mesh=8),
    case("index_pairs", lambda a, i, j: a[i, j], reals(4, 3), integers(8, high=4),
         integers(8, high=3), per_mesh=8),
]
