"""Each way to train on several ranks, by weft and by others: a model, and where its batch lies.

All take the same steps: forward, loss, backward, AdamW. In every one a rank has the same part of
the work. The others are used as their documentation does: DistributedDataParallel, `fully_shard`
of each block and of the whole, tensor parallel plans of DTensor with a loss that is parallel, too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import weft
from bench.training import by_hand
from bench.training.models import MODELS, Shape
from weft import P

__all__ = ["WAYS", "Trained", "Way", "make", "table_of"]


@dataclass(slots=True)
class Trained:
    """A model that is sharded, its part of the batch, and what its loss needs."""

    model: Any
    given: Any
    loss: Callable[[Any, Any], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    after: Callable[[Any], Any] = lambda loss: loss
    """Between backward and step; gives the loss of the whole batch."""
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self) -> Any:
        """Forward and backward."""
        with self.around():
            loss = self.loss(self.model(self.given), self.given)
            loss.backward()
        return self.after(loss.detach())

    def step(self) -> Any:
        """One step of training; its loss."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


Make = Callable[[str, Shape], Trained]


def make(system: str, way: str, model: str, shape: Shape) -> Trained:
    """Such a model on all ranks of the world.

    Raises:
        KeyError: the system has no such way, or not for this model.
    """
    return WAYS[way].systems[system](model, shape)


def _plain(model: str, shape: Shape, rows: int) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    what = MODELS[model]
    return what.make(shape), what.given(shape, rows), what.loss


def _block(x: Tensor, dim: int, index: int, num: int) -> Tensor:
    return x.chunk(num, dim)[index].contiguous()


def _mean(loss: Any, group: Any = None) -> Any:
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    dist.all_reduce(loss, group=group)
    return loss / dist.get_world_size(group)


def _mesh(way: str) -> DeviceMesh:
    sizes, names = WAYS[way].axes(dist.get_world_size())
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


# weft.

_ROWS = ("*.q", "*.k", "*.v", "*.up", "*.gate")
_COLUMNS = ("*.out", "*.down")
_NORMS = ("*.norm1", "*.norm2", "norm")


def tables() -> dict[str, tuple[dict[str, Any], P]]:
    """Of each way the shardings, and where the batch lies."""
    by_tp = {
        "token.weight": P("tp"), "head.weight": P("tp"),
        **{f"{name}.*": P("tp") for name in _ROWS},
        **{f"{name}.weight": P(None, "tp") for name in _COLUMNS},
    }
    by_styles = {
        "token": weft.nn.VocabParallel("tp", output_layouts=Shard(1)),
        "head": weft.nn.VocabParallel("tp"),
        **{name: weft.nn.ColwiseParallel("tp") for name in _ROWS},
        **{name: weft.nn.RowwiseParallel("tp", output_layouts=Shard(1))
           for name in _COLUMNS},
        **{name: weft.nn.SequenceParallel("tp") for name in _NORMS},
    }
    both = {
        **{name: P(("tp", "dp")) for name, spec in by_tp.items() if spec == P("tp")},
        **{name: P("dp", "tp") for name, spec in by_tp.items() if spec != P("tp")},
        "*": P("dp"),
    }
    return {
        "data": ({}, P("dp")),
        "fully sharded": ({"*": P("dp")}, P("dp")),
        "tensor": (by_tp, P()),
        "sequences": (by_styles, P(None, "tp")),
        "fully sharded x tensor": (both, P("dp")),
    }


def table_of(way: str, model: nn.Module) -> dict[str, Any]:
    """The shardings of a way, of what the model has."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    return {one: spec for one, spec in tables()[way][0].items() if fnmatch.filter(names, one)}


def _weft(way: str) -> Make:
    def made(model: str, shape: Shape) -> Trained:
        mesh = weft.init_mesh(dict(zip(*reversed(WAYS[way].axes(dist.get_world_size())))))
        _, spec = tables()[way]
        rows = shape.batch * WAYS[way].parts(dist.get_world_size())
        plain, given, loss = _plain(model, shape, rows)
        table = table_of(way, plain)
        spec = P() if model == "Llama" and way == "sequences" else spec
        placed = weft.distribute_tensor(given, mesh, spec, src_data_rank=None)
        sharded = weft.distribute_module(plain, mesh, shardings=table, src_data_rank=None)
        return Trained(sharded, placed, loss)

    return made


# Others.

def _of_batch(model: str, shape: Shape) -> tuple[nn.Module, Tensor, Any]:
    """A plain model, and this rank's part of the batch."""
    num = dist.get_world_size()
    plain, given, loss = _plain(model, shape, shape.batch * num)
    return plain, _block(given, 0, dist.get_rank(), num), loss


def _ddp(model: str, shape: Shape) -> Trained:
    plain, mine, loss = _of_batch(model, shape)
    wrapped = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # which gives no tensor back, as DDP's own hook would like
        wrapped.register_comm_hook(None, _fake_hook)
    return Trained(wrapped, mine, loss, after=_mean)


def _fake_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer())
    done.set_result(bucket.buffer())
    return done


_fake_hook.__annotations__.clear()  # which DDP would like to be no texts


def _fsdp(model: str, shape: Shape) -> Trained:
    plain, mine, loss = _of_batch(model, shape)
    return Trained(_fully_sharded(plain, _mesh("fully sharded")), mine, loss, after=_mean)


def _fully_sharded(plain: Any, mesh: DeviceMesh) -> nn.Module:
    for layer in getattr(plain, "body", plain).layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(plain, mesh=mesh)


def _plan(sequences: bool) -> dict[str, Any]:
    enters = Shard(1) if sequences else Replicate()
    plan: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=enters),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        **{name: ColwiseParallel() for name in _ROWS},
        **{name: RowwiseParallel(output_layouts=enters) for name in _COLUMNS},
    }
    if sequences:
        plan |= {name: SequenceParallel() for name in _NORMS}
    return plan


def _parallelized(plain: nn.Module, mesh: DeviceMesh, sequences: bool) -> nn.Module:
    names = [name for name, _ in plain.named_modules()]
    plan = {}
    for pattern, style in _plan(sequences).items():
        suffix = pattern.removeprefix("*.")
        plan |= {name: style for name in names
                 if name == pattern or (pattern != suffix and name.endswith(f".{suffix}"))}
    parallelize_module(plain, mesh, plan)
    if sequences:  # gathered once for all that follows a norm
        for name, part in plain.named_modules():
            if name.split(".")[-1] in ("norm", "norm1", "norm2"):
                part.register_forward_hook(lambda _, __, out: out.redistribute(
                    placements=[Replicate()]))
    return plain


def _dtensor(sequences: bool) -> Make:
    way = "sequences" if sequences else "tensor"

    def made(model: str, shape: Shape) -> Trained:
        num = dist.get_world_size()
        plain, given, loss = _plain(model, shape, shape.batch)
        _parallelized(plain, _mesh(way), sequences)
        if not sequences or model == "Llama":
            return Trained(plain, given, loss, loss_parallel if model == "Llama" else nullcontext)
        mine = _block(given, 1, dist.get_rank(), num)
        return Trained(plain, mine, lambda out, given: loss(out, given) / num, after=_sum)

    return made


def _sum(loss: Any) -> Any:
    dist.all_reduce(loss)
    return loss


def _fsdp_of_dtensor(model: str, shape: Shape) -> Trained:
    mesh = _mesh("fully sharded x tensor")
    plain, given, loss = _plain(model, shape, shape.batch * mesh.size(0))
    _parallelized(plain, mesh["tp"], False)
    _fully_sharded(plain, mesh["dp"])
    mine = _block(given, 0, mesh.get_local_rank("dp"), mesh.size(0))
    around = loss_parallel if model == "Llama" else nullcontext
    return Trained(plain, mine, loss, around, lambda loss: _mean(loss, mesh.get_group("dp")))


def _data_by_hand(model: str, shape: Shape) -> Trained:
    plain, mine, loss = _of_batch(model, shape)
    summed = by_hand.in_one_bucket(plain.parameters(), dist.get_world_size())
    return Trained(plain, mine, loss, after=summed)


def _tensor_by_hand(sequences: bool) -> Make:
    def made(model: str, shape: Shape) -> Trained:
        if model != "blocks":
            raise KeyError(model)
        num, rank = dist.get_world_size(), dist.get_rank()
        plain, given, loss = _plain(model, shape, shape.batch)
        part = by_hand.tensor_parallel(plain, sequences)
        if not sequences:
            return Trained(part, given, loss)
        return Trained(
            part, _block(given, 1, rank, num), lambda out, given: loss(out, given) / num,
            after=by_hand.in_one_bucket(by_hand.norms_of(part)))

    return made


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is trained on several ranks: names of mesh axes, what does so."""

    names: tuple[str, ...]
    systems: dict[str, Make]

    def axes(self, num_ranks: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The mesh: where it has two axes, tp has two ranks."""
        sizes = (num_ranks,) if len(self.names) == 1 else (num_ranks // 2, 2)
        return sizes, self.names

    def parts(self, num_ranks: int) -> int:
        """Parts of the batch."""
        return self.axes(num_ranks)[0][0] if self.names[0] == "dp" else 1

    def width_for(self, model: str, num_ranks: int) -> int:
        """The least width at which each rank of tp has a whole head. With less weft trains as well,
        but DTensor does not, and neither does the "fake" backend, on which a rank with nothing to
        send receives nothing."""
        sizes = dict(zip(self.names, self.axes(num_ranks)[0]))
        return MODELS[model].head_width * sizes.get("tp", 1)


WAYS = {
    "data": Way(("dp",), {
        "weft": _weft("data"), "DDP": _ddp, "by hand": _data_by_hand}),
    "fully sharded": Way(("dp",), {"weft": _weft("fully sharded"), "FSDP2": _fsdp}),
    "tensor": Way(("tp",), {
        "weft": _weft("tensor"), "DTensor": _dtensor(False), "by hand": _tensor_by_hand(False)}),
    "sequences": Way(("tp",), {
        "weft": _weft("sequences"), "DTensor": _dtensor(True), "by hand": _tensor_by_hand(True)}),
    "fully sharded x tensor": Way(("dp", "tp"), {
        "weft": _weft("fully sharded x tensor"), "FSDP2 of DTensor": _fsdp_of_dtensor}),
}
"""`sequences` is tensor parallel, between blocks sharded over the sequence."""
