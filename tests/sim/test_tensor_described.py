"""distribute_tensor and scatter_tensor: what ranks pass is compared, and memory order is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.harness import ranks
from tests.memory_order import disagreement
from weft import (
    LayoutError,
    P,
    Replicate,
    Shard,
    ShardTensor,
    ShardTypeError,
    WeftError,
    spmd,
)
from weft.comm.simulated import SimulatedCommunicator

SPECS = [
    P("dp"), P(("dp", "tp")), P(None, "tp"), P("tp", "dp"), P(), P("dp", partial={"tp": "sum"}),
]
MESH = {"dp": 2, "tp": 2}


def odd(mesh: Any, usual: Any, other: Any) -> Any:
    return other if mesh.rank == 2 else usual


class Named(Tensor):
    """Plain memory under another name."""


class Packed(Tensor):
    """Stands for a quantized weight of another library, which holds tensors of its own."""

    def __tensor_flatten__(self) -> Any: ...


TENSORS: dict[str, Any] = {
    "shape": (lambda m: (torch.ones(odd(m, 4, 6), 3), P("dp")), "f32[6@dp, 3]"),
    "dims": (lambda m: (torch.ones(odd(m, (4, 3), (4,))), P("dp")), "f32[4@dp]"),
    "dtype": (lambda m: (torch.ones(4, 3, dtype=odd(m, torch.float32, torch.int32)), P()),
              "i32[4, 3]"),
    "placements": (lambda m: (torch.ones(4, 3), odd(m, P("dp"), P("tp"))), "f32[4@tp, 3]"),
    "gradient": (lambda m: (torch.ones(4, 3, requires_grad=m.rank == 2), P("dp")),
                 "f32[4@dp, 3] that requires grad"),
    "list": (lambda m: (odd(m, torch.ones(2), [1.0, 2.0]), P()),
             "distribute_tensor(tensor): it is of type list"),
    "numpy": (lambda m: (odd(m, torch.ones(2), torch.ones(2).numpy()), P()),
              "distribute_tensor(tensor): it is of type numpy.ndarray"),
    "too many dims cut": (lambda m: (odd(m, torch.ones(2, 2), torch.ones(2)), P(None, "dp")), ""),
    "sparse": (lambda m: (odd(m, torch.ones(2), torch.ones(2).to_sparse()), P()),
               "distribute_tensor(tensor): it is torch.float32 of torch.sparse_coo"),
    "packed": (lambda m: (odd(m, torch.ones(2), torch.ones(2).as_subclass(Packed)), P()),
               "distribute_tensor(tensor): it is of class Packed"),
}


@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize("kind", TENSORS)
def test_one_rank_passes_something_else(kind: str, source: int) -> None:
    make, due = TENSORS[kind]

    def on_rank(mesh: Any) -> str:
        with pytest.raises(WeftError) as caught:
            given, spec = make(mesh)
            weft.distribute_tensor(given, mesh, spec, src_data_rank=source)
        x = weft.distribute_tensor(torch.ones(4), mesh, P("dp"))  # all are in step
        assert x.sum().item() == 4
        return str(caught.value)

    said = weft.testing.run(on_rank, mesh=MESH)
    assert said[0] == said[1] == said[3]
    text = said[0].replace("float32", "f32").replace("int32", "i32")
    if source == 2 and "[" in due:
        assert text.startswith(f"distribute_tensor(tensor): rank 2 has {due}, and 3 ranks another")
    else:
        assert f"Offenders: rank 2: {due}" in text.replace("torch.f32 of", "torch.float32 of"), text
    assert "\n  Rule: " in said[2] and "\n  Fix: " in said[2]


def test_own_data_are_compared_in_debug_mode_alone() -> None:
    def on_rank(mesh: Any) -> str:
        full = torch.ones(odd(mesh, 4, 6))
        if not mesh.world.debug.on:
            with weft.explain() as log:
                x = weft.distribute_tensor(full, mesh, P("dp"), src_data_rank=None)
            assert not log.events
            return str(x.shape)
        with pytest.raises(LayoutError) as caught:
            weft.distribute_tensor(full, mesh, P("dp"), src_data_rank=None)
        return str(caught.value)

    plain = weft.testing.run(on_rank, mesh=MESH)
    assert plain[0] != plain[2]
    with weft.debug():
        said = weft.testing.run(on_rank, mesh=MESH)
    assert said == [said[0]] * 4 and "Offenders: rank 2: float32[6@dp]" in said[0].replace(
        "f32", "float32")


def test_modules_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, usual = [], SimulatedCommunicator._exchange

    def counted(self: Any, value: Any) -> Any:
        seen.append(value)
        return usual(self, value)

    monkeypatch.setattr(SimulatedCommunicator, "_exchange", counted)

    def on_rank(mesh: Any) -> str:
        weft.distribute_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), mesh)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3 if mesh.rank else 5))
        with pytest.raises(LayoutError) as caught:
            weft.distribute_module(model, mesh, shardings={"0.weight": P("dp")})
        assert type(model[0].weight) is nn.Parameter  # nothing was replaced
        return str(caught.value)

    said = weft.testing.run(on_rank, mesh={"dp": 2})
    assert said[0] == said[1] and "1.weight f32[5, 4]" in said[0]
    assert len(seen) == 4  # one of each rank and module


ORDERS: dict[str, Any] = {
    "channels last": lambda: torch.arange(210.0).view(5, 3, 2, 7).contiguous(
        memory_format=torch.channels_last),
    "transposed": lambda: torch.arange(35.0).view(7, 5).t(),
    "permuted": lambda: torch.arange(105.0).view(7, 3, 5).permute(2, 0, 1),
    "with gaps": lambda: torch.arange(70.0).view(7, 10).t()[::2],
    "expanded": lambda: torch.arange(5.0).view(5, 1).expand(5, 7),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_order_of_strides_is_kept(order: str, spec: P) -> None:
    whole: Tensor = ORDERS[order]()
    due = whole.clone().stride()

    def on_rank(mesh: Any) -> None:
        elsewhere = whole if mesh.rank == 1 else torch.zeros(whole.shape)
        made = [
            weft.distribute_tensor(whole, mesh, spec),
            weft.distribute_tensor(elsewhere, mesh, spec, src_data_rank=1),
            weft.distribute_tensor(whole, mesh, spec, src_data_rank=None),
            weft.scatter_tensor(whole if mesh.rank == 3 else None, 3, mesh, spec),
        ]
        for x in made:
            local = x.to_local()
            assert x.stride() == due and x.is_contiguous() == whole.clone().is_contiguous()
            assert disagreement(tuple(x.shape), x.stride(), local) is None
            assert local.untyped_storage().nbytes() == local.nbytes
            assert torch.equal(x.full_tensor(), whole) and (x * 1).stride() == (whole * 1).stride()
        meta = weft.distribute_tensor(whole.to("meta"), mesh, spec)
        assert meta.stride() == torch.empty_like(whole, device="meta").stride()

    weft.testing.run(on_rank, mesh=MESH)


@pytest.mark.parametrize("call", ["distribute_tensor", "scatter_tensor", "from_local"])
@pytest.mark.parametrize("what", [[1.0, 2.0], 3, torch.ones(2).numpy(), "x", None], ids=type)
def test_no_tensor(call: str, what: Any) -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(WeftError) as caught:
            if call == "scatter_tensor":
                weft.scatter_tensor(what, 0, mesh, [Shard(0), Replicate()])
            elif call == "from_local":
                ShardTensor.from_local(what, mesh, [Shard(0), Replicate()])
            else:
                weft.distribute_tensor(what, mesh, [Shard(0), Replicate()])
        return str(caught.value)

    for said in weft.testing.run(on_rank, mesh=MESH):
        assert [line.split(":")[0].strip() for line in said.splitlines()[1:4]] == [
            "Rule", "Offenders", "Fix"], said


@pytest.mark.parametrize("source", ["0", None, 1.0, True])
@ranks(**MESH)
def test_a_source_that_is_no_rank(mesh: Any, source: Any) -> None:
    with pytest.raises(ShardTypeError, match="is of type"):
        weft.scatter_tensor(torch.ones(2), source, mesh, P())
    if source is not None:
        with pytest.raises(ShardTypeError, match="is of type"):
            weft.distribute_tensor(torch.ones(2), mesh, P(), src_data_rank=source)


def test_a_distributed_source() -> None:
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(torch.ones(4), mesh, P("dp"))
        said = []
        for given in (x, torch.ones(2).to_sparse()):
            with pytest.raises(WeftError) as caught:
                weft.scatter_tensor(given, 1, mesh, P("tp"))
            said.append(str(caught.value))
        with pytest.raises(ShardTypeError, match=r"global_shape=.*2, of type int"):
            weft.scatter_tensor(torch.ones(2), 1, mesh, P("tp"), global_shape=odd(mesh, (2,), 2))
        return said

    said = weft.testing.run(on_rank, mesh=MESH)
    assert said[1][0].startswith("scatter_tensor(tensor): it is distributed already, as [4@dp].")
    assert all("rank 1: scatter_tensor(tensor): it is" in one for rank in (0, 2, 3)
               for one in said[rank])


NO_TENSORS: dict[str, Any] = {
    "mark_sharding": lambda m, t: spmd.mark_sharding(t, m, ("dp",)),
    "mark_sharding_with_gradients": lambda m, t: spmd.mark_sharding_with_gradients(t, m, ("dp",)),
    "shard_as": lambda m, t: spmd.shard_as(torch.ones(2), t),
    "wrap_as_sharded_tensor": lambda m, t: spmd.wrap_as_sharded_tensor(t, m),
    "enable_manual_sharding": lambda m, t: spmd.enable_manual_sharding(t, ("dp",), mesh=m),
    "disable_manual_sharding": lambda m, t: spmd.disable_manual_sharding(t, ("dp",), (2,), mesh=m),
    "barrier": lambda m, t: spmd.apply_backward_optimization_barrier(t),
    "ShardTensor": lambda m, t: ShardTensor(t),
}


@pytest.mark.parametrize("call", NO_TENSORS)
@pytest.mark.parametrize("what", [[1.0, 2.0], torch.ones(2).numpy(), 3, None], ids=type)
def test_no_tensor_in_annotations(call: str, what: Any) -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(ShardTypeError) as caught:
            NO_TENSORS[call](mesh, what)
        return str(caught.value)

    for said in weft.testing.run(on_rank, mesh=MESH):
        assert [line.split(":")[0].strip() for line in said.splitlines()[1:4]] == [
            "Rule", "Offenders", "Fix"], said


@pytest.mark.parametrize("make", [
    lambda t: ShardTensor(t), lambda t: t.as_subclass(ShardTensor),
    lambda t: nn.Parameter(t).as_subclass(ShardTensor), lambda t: ShardTensor(),
])
def test_a_class_makes_none(make: Any) -> None:
    with pytest.raises(ShardTypeError, match="a ShardTensor has a mesh and a layout"):
        make(torch.ones(2))


def test_other_classes_are_made_as_ever() -> None:
    class Other(Tensor):
        pass

    one = torch.ones(2)
    assert type(one.as_subclass(Other)) is Other
    assert type(one.as_subclass(Other).as_subclass(Tensor)) is Tensor
    assert type(torch.Tensor.as_subclass(one, Other)) is Other


def test_no_other_class_is_made_of_a_shard_tensor() -> None:
    """MONAI's MetaTensor and torchvision's Image ask for it."""
    class Image(Tensor):
        pass

    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(torch.ones(4, 3), mesh, P("dp"))
        with pytest.raises(weft.UnsupportedOpError) as caught:
            torch.as_tensor(x).as_subclass(Image)
        return str(caught.value)

    for said in weft.testing.run(on_rank, mesh=MESH):
        assert said == """\
x.as_subclass(Image): x is a ShardTensor [4@dp, 3].
  Rule: a ShardTensor is global and has no memory that another class could show.
  Offenders: Image
  Fix: leave the class out: of MONAI, monai.data.set_track_meta(False); of torchvision, x itself \
in place of tv_tensors.Image(x)
       Image(x.full_tensor()), which is whole on every rank"""


def test_a_local_tensor_comes_to_the_device_of_the_mesh() -> None:
    """The meta device stands for any other."""
    def on_rank(_: Any) -> tuple[str, str, str]:
        mesh = weft.init_mesh(MESH, device_type="meta")
        local = torch.ones(2, 3, requires_grad=True)
        x = ShardTensor.from_local(local, mesh, P("dp"), shape=(4, 3))
        assert x.requires_grad and x.to_local().grad_fn is not None
        here = weft.init_mesh(MESH, device_type="cpu")
        meta = ShardTensor.from_local(torch.ones(2, 3, device="meta"), here, P("dp"), shape=(4, 3))
        return x.device.type, x.to_local().device.type, meta.device.type

    assert weft.testing.run(on_rank, 4) == [("meta",) * 3] * 4


@ranks(dp=2)
def test_a_module_with_weights_of_a_class_of_their_own_is_refused(mesh: Any) -> None:
    module = nn.Linear(3, 4)
    module.bias = nn.Parameter(torch.ones(4).as_subclass(Packed))
    with pytest.raises(WeftError, match="bias: it is of class Packed, with data of its own"):
        weft.distribute_module(module, mesh, shardings={"*": P("dp")})
    assert type(module.weight) is nn.Parameter


@ranks(dp=2)
def test_the_block_of_a_subclass_is_plain_on_the_source_too(mesh: Any) -> None:
    x = weft.distribute_tensor(torch.ones(4).as_subclass(Named), mesh, P("dp"))
    assert type(x.to_local()) is Tensor
