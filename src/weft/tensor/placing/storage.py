"""A ShardTensor's memory: the size is known, an address is not.

Programs that only add up bytes (torchinfo) get the global tensor's. Requests for more than the size
are refused, and the error names the alternatives.
"""

from __future__ import annotations

from typing import Any, NoReturn

from weft.errors import UnsupportedOpError, message
from weft.tensor.modes import check_traced
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["Storage", "memory_refused"]


def memory_refused(name: str, tensor: ShardTensor) -> UnsupportedOpError:
    """The error of a call that asks where a ShardTensor is in memory."""
    layout = str(tensor.sharding)
    return UnsupportedOpError(
        message(f"{name}()", f"no single address or storage holds a global tensor; the tensor is "
                f"{layout}", "what reads or changes memory works on local tensors", [layout],
                f"of this rank's block: x.to_local().{name}()\n"
                "for safetensors and save_pretrained: "
                "{name: x.full_tensor() for name, x in module.state_dict().items()}\n"
                "    on every rank, of which one writes\n"
                "for a file of blocks: torch.save, torch.distributed.checkpoint")
    )


class Storage:
    """The storage of a ShardTensor, as far as it exists: the bytes of the global tensor."""

    def __init__(self, tensor: ShardTensor) -> None:
        check_traced("untyped_storage")
        self._tensor = tensor

    def nbytes(self) -> int:
        return self._tensor.numel() * self._tensor._meta.dtype.itemsize

    size = __len__ = nbytes

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes()

    @property
    def device(self) -> Any:
        return self._tensor.device

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python looks for, as copy does
            raise AttributeError(name)
        raise memory_refused(f"untyped_storage().{name}", self._tensor)
