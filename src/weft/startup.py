"""Loads the part of weft that needs torch as soon as weft and torch are both imported.

That part changes functions of torch: `torch.manual_seed` seeds weft's stream too, `torch.load` can
read ShardTensors, checkpoints and autograd handle them. So it must be there before any of them is
called, whichever names of weft a program uses, and whichever it imports first:

- weft after torch: at once;
- torch after weft, or a part of weft that imports torch (a room, or what a pickle names): when
  that import ends. An entry of `sys.meta_path` watches for it, and is removed afterwards.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["WITH_TORCH", "watch"]

WITH_TORCH = (
    "rng", "comm", "transport", "tensor", "local", "nn", "own", "spmd", "interop", "testing",
    "plotting", "dry",
)
"""The rooms that need torch."""


def watch() -> None:
    """Load the part that needs torch now, if torch is there, else as soon as it is."""
    watcher = _Watcher()
    sys.meta_path.insert(0, watcher)
    watcher.settle(sys.modules["weft"])


class _Watcher:
    """Finds torch and the rooms of weft as others do, and notices when they have run."""

    def __init__(self) -> None:
        self.depth = 0
        """Such imports under way, one within the other. A room that has run in part is of no use
        to the others, so the outermost one must end first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" and not (name.startswith("weft.") and name.count(".") == 1):
            return None
        for finder in list(sys.meta_path):
            another = type(finder).__module__ == __name__  # of weft imported anew
            find = None if another else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def settle(self, module: ModuleType) -> None:
        """Load the rest of weft if torch is there and no such import is under way.

        Args:
            module: what has run. Its import lock is still held, so other threads must not wait for
                it. One that does already, and holds a room meanwhile, loads the rest afterwards.
        """
        if self.depth or "torch" not in sys.modules or self not in sys.meta_path:
            return
        module.__spec__._initializing = False  # type: ignore[union-attr]
        self.depth += 1
        try:
            for room in WITH_TORCH:
                importlib.import_module(f"weft.{room}")
        except RuntimeError as error:
            if type(error).__name__ != "_DeadlockError":
                raise
            return
        finally:
            self.depth -= 1
        if self in sys.meta_path:  # no other thread has done the same
            sys.meta_path.remove(self)
            importlib.import_module("weft.patches").install()


class _Loader:
    """A module's own loader, which takes its place again before the module runs."""

    def __init__(self, loader: Any, watcher: _Watcher) -> None:
        self._loader, self._watcher = loader, watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._watcher.depth += 1
        try:
            self._loader.exec_module(module)
        finally:
            self._watcher.depth -= 1
        self._watcher.settle(module)
