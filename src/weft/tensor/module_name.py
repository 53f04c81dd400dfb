"""The name of ShardTensor's module, for libraries that read from it which library an object belongs
to.

Libraries that serve several array libraries (opt_einsum, autoray) read from the first part of
`type(x).__module__` which library's functions x needs. An unknown name counts as numpy's: without
gradients, and gathered. A ShardTensor needs torch's functions. Its class is found
by the module's true name all the same, which is what pickle, inspect and documentation read.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ServedByTorch"]


class ServedByTorch(str):
    """The true name; taken apart, or asked for its beginning, it begins with torch's."""

    __slots__ = ()

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        return f"torch.{self}".split(sep, maxsplit)

    def partition(self, sep: str) -> tuple[str, str, str]:
        return f"torch.{self}".partition(sep)

    def startswith(self, prefix: Any, *between: Any) -> bool:
        name = str(self)
        return name.startswith(prefix, *between) or f"torch.{name}".startswith(prefix, *between)

    def __str__(self) -> str:
        return "".join(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)
