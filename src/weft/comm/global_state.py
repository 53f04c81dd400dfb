"""Global state of a process that is separate for each rank: saved and restored as ranks alternate.

Of torch: default dtype, default generators, anomaly mode, deterministic algorithms, precision of
products, number of threads, which kernels of attention may run, whether saved tensors may be
written to, whether checkpoints stop early, and the weights that `parametrize.cached` keeps. Of
Python: the generator behind `random` and the filters of `warnings`. Of numpy: the generator behind
`numpy.random.rand`.
Not included: forward AD, because leaving a level of it would end the rank's tangents. Rooms above
add their own global state to `CARRIED`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import graph
from torch.nn.utils import parametrize
from torch.utils import checkpoint

from weft.comm.random_states import NUMPYS, PYTHONS, RandomState

__all__ = ["CARRIED", "GlobalState"]

CARRIED: list[Any] = []
"""Objects with a generator's `get_state` and `set_state`, whose state is separate for each rank."""

_WARNINGS: Any = warnings
_OF_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")
"""What `warnings.catch_warnings` replaces."""


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _deterministic() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def _set_deterministic(state: tuple[bool, bool, bool]) -> None:
    is_on, warn_only, fills = state
    torch.use_deterministic_algorithms(is_on, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


_PARTS: list[tuple[Any, Any]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_anomaly, lambda state: torch.set_anomaly_enabled(*state)),
    (_deterministic, _set_deterministic),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    *[(getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
      for name in ("cudnn", "flash", "math", "mem_efficient", "overrideable")],
    *[(partial(getattr, module, name), partial(setattr, module, name))
      for module, name in ((graph, "_allow_mutation_on_saved_tensors_enabled"),
                           (checkpoint, "_enable_checkpoint_early_stop"),
                           (checkpoint, "_checkpoint_debug_enabled"))],
]
"""What tells a part of the state, and what sets it where it is another."""


class GlobalState:
    """All of this at one moment. `before`: an earlier state, whose equal parts may be reused."""

    def __init__(
        self, generators: Sequence[torch.Generator], before: GlobalState | None = None
    ) -> None:
        self.parts = [told() for told, _ in _PARTS]
        self.parametrized = parametrize._cache_enabled, parametrize._cache
        self.warnings = [getattr(_WARNINGS, name) for name in _OF_WARNINGS]
        self.random = [
            RandomState(generator, None if before is None else before.random[number])
            for number, generator in enumerate((PYTHONS, NUMPYS))
        ]
        self.generators = (*generators, *CARRIED)
        self.states = [generator.get_state() for generator in self.generators]

    def restore(self) -> None:
        for (told, set_), part in zip(_PARTS, self.parts):
            if told() != part:
                set_(part)
        parametrize._cache_enabled = self.parametrized[0]
        parametrize._cache = self.parametrized[1].copy()  # ranks begin with the same object
        if _WARNINGS.filters is not self.warnings[0]:
            for name, value in zip(_OF_WARNINGS, self.warnings):
                setattr(_WARNINGS, name, value)
            _WARNINGS._filters_mutated()  # given warnings are remembered per set of filters
        for state in self.random:
            state.restore()
        for generator, state in zip(self.generators, self.states):
            generator.set_state(state)
