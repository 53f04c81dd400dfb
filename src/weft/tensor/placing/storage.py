"""A ShardTensor's memory: it has a size and no address.

Programs that only add up bytes (torchinfo) get the global tensor's. Requests for more than the size
are refused, and the error names the alternatives. Programs that compare addresses, to find tensors
that share memory, get a number if they are known to do nothing else with it (`telling_identity`).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from weft.core.scopes import setting
from weft.errors import UnsupportedOpError
from weft.tensor.modes import check_traced
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.views.moved import unwrap_view
from weft.transport.in_flight import landed

__all__ = ["Storage", "memory_refused", "telling_identity", "typed_storage"]


class _Told(threading.local):
    identity = False


_told = _Told()


def telling_identity() -> AbstractContextManager[None]:
    """Inside, `untyped_storage().data_ptr()` is one number for tensors that share memory, the same
    on all ranks, and another for other tensors. It is no address."""
    return setting(_told, identity=True)


_LOADER = """
for a DataLoader with workers: a dataset of plain tensors, and weft.spmd.ShardedLoader around it"""


def typed_storage(tensor: ShardTensor) -> NoReturn:
    """`x._typed_storage()`: the workers of a DataLoader put batches into shared memory by it."""
    raise memory_refused("storage", tensor, _LOADER)


def memory_refused(name: str, tensor: ShardTensor, more: str = "") -> UnsupportedOpError:
    """The error of a call that asks where a ShardTensor is in memory."""
    layout = str(tensor.sharding)
    return UnsupportedOpError(
        f"{name}()", f"no single address or storage holds a global tensor; the tensor is "
        f"{layout}", "what reads or changes memory works on local tensors", [layout],
        f"of this rank's block: x.to_local().{name}()\n"
        "for a file: safetensors.torch.save_file, save_pretrained and "
        f"torch.distributed.checkpoint, called on all ranks{more}")


class Storage:
    """The storage of a ShardTensor, as far as it exists: the bytes of the global tensor."""

    def __init__(self, tensor: ShardTensor) -> None:
        check_traced("untyped_storage")
        self._tensor = tensor

    def nbytes(self) -> int:
        return self._tensor.numel() * self._tensor._meta.dtype.itemsize

    size = __len__ = nbytes

    def data_ptr(self) -> int:
        if not _told.identity:
            raise memory_refused("untyped_storage().data_ptr", self._tensor)
        return unwrap_view(landed(self._tensor._local)).untyped_storage()._cdata

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes()

    @property
    def device(self) -> Any:
        return self._tensor.device

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python looks for, as copy does
            raise AttributeError(name)
        raise memory_refused(f"untyped_storage().{name}", self._tensor)
