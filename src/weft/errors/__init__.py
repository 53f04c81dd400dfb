"""The library's exception classes, and the one way to write their messages.

Every error that a user can cause has five parts: the call and argument, the facts that disagree
(with numbers), the rule, every offender at once, and code that fixes it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CommunicationError",
    "LayoutError",
    "MeshError",
    "ModuleError",
    "PlacementError",
    "ShardTypeError",
    "StrictError",
    "UnsupportedOpError",
    "WeftError",
    "WeftWarning",
    "message",
]


class WeftError(Exception):
    """Base of every error that weft raises on purpose: of the parts of `message`, or of a text."""

    def __init__(
        self, call: str, facts: str = "", rule: str = "", offenders: Sequence[object] = (),
        fix: str = "",
    ) -> None:
        super().__init__(message(call, facts, rule, offenders, fix) if facts else call)


class MeshError(WeftError, ValueError):
    """An invalid mesh, or meshes that do not fit together."""


class PlacementError(WeftError, ValueError):
    """A placement or partition spec that is malformed, or outside its domain."""


class LayoutError(WeftError, ValueError):
    """A layout that contradicts its mesh, its global shape, or a local tensor."""


class ModuleError(WeftError, ValueError, RuntimeError):
    """A module that cannot be distributed, initialized or loaded as requested."""


class ShardTypeError(WeftError, TypeError):
    """An argument of the wrong type."""


class UnsupportedOpError(WeftError, NotImplementedError):
    """An operation that weft refuses on a ShardTensor because it cannot do it right."""


class StrictError(WeftError, RuntimeError):
    """Under `weft.strict()`: an operation would communicate implicitly."""


class CommunicationError(WeftError, RuntimeError):
    """Ranks that do different things, or that died."""


class WeftWarning(UserWarning):
    """Something is right but more expensive than it looks."""


def message(
    call: str, facts: str, rule: str, offenders: Sequence[object] = (), fix: str = ""
) -> str:
    """The five parts of an error as text: call, facts, rule, offenders, fix.

    >>> print(message("Mesh(axes)", "axis 'dp' has size 0", "axis sizes are at least 1",
    ...               ["dp=0"], 'Mesh({"dp": 1})'))
    Mesh(axes): axis 'dp' has size 0.
      Rule: axis sizes are at least 1.
      Offenders: dp=0
      Fix: Mesh({"dp": 1})
    """
    lines = [f"{call}: {facts}.", f"  Rule: {rule}."]
    if offenders:
        lines.append("  Offenders: " + ", ".join(str(offender) for offender in offenders))
    if fix:
        lines.append("  Fix: " + fix.replace("\n", "\n       "))
    return "\n".join(lines)
