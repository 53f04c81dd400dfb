"""`local_map`: values and gradients are those of the same computation on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torchs
from torch import Tensor

import weft
from tests.harness import ranks
from weft import (
    LayoutError,
    MeshError,
    P,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    ShardTensor,
    ShardTypeError,
    UnsupportedOpError,
    collectives,
    local_map,
)

DTYPE = torch.float64
MESH = {"a": 2, "b": 3}
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
W = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=DTYPE)


def held(mesh: Any, tensor: Tensor, spec: Any) -> ShardTensor:
    return weft.distribute_tensor(tensor, mesh, spec, src_data_rank=None).requires_grad_()


def full(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, ShardTensor) else x


PROGRAMS: dict[str, tuple[Callable[..., Any], Any, Any, Callable[..., Any]]] = {
    "by rows": (lambda x, w: x @ w, (P("a"), P()), P("a"), lambda x, w: x @ w),
    "by rows over both axes": (lambda x, w: x @ w, (P(("b", "a")), None), P(("b", "a")),
                               lambda x, w: x @ w),
    "terms": (lambda x, w: x @ w, (P(None, "b"), P("b")), [Replicate(), Partial()],
              lambda x, w: x @ w),
    "summed inside": (lambda x, w: collectives.psum(x @ w, "b"), (P(None, "b"), P("b")), P(),
                      lambda x, w: x @ w),
    "rows and terms": (lambda x, w: collectives.psum(x @ w, "b"), (P("a", "b"), P("b")), P("a"),
                       lambda x, w: x @ w),
    "alike": (lambda x, w: (x @ w).tanh(), (P(), P()), P(), lambda x, w: (x @ w).tanh()),
    "softmax over a cut dim": (
        lambda x, w: x.exp() / collectives.psum(x.exp().sum(1, keepdim=True), "b"),
        (P(None, "b"), None), P(None, "b"), lambda x, w: x.softmax(1)),
    "several results": (
        lambda x, w: (x * 2, collectives.psum((x @ w).sum(), "a")), (P("a"), P()),
        (P("a"), P()), lambda x, w: (x * 2, (x @ w).sum())),
    "nested": (lambda both, scale: {"y": both["x"] * scale}, (P("a"), None), P("a"),
               lambda both, scale: {"y": both["x"] * scale}),
}


def called(name: str, fn: Callable[..., Any], x: Tensor, w: Tensor) -> list[Tensor]:
    out = fn({"x": x}, 3.0) if name == "nested" else fn(x, w)
    return list(out) if isinstance(out, tuple) else [out["y"] if isinstance(out, dict) else out]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P(("a", "b"))], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_whole_tensors(name: str, spec: P, plain: bool) -> None:
    inside, in_specs, out_specs, outside = PROGRAMS[name]
    wx, ww = X.clone().requires_grad_(), W.clone().requires_grad_()
    dues = called(name, outside, wx, ww)
    sum((due * due).sum() for due in dues).backward()  # type: ignore[union-attr]

    def on_rank(mesh: Any) -> None:
        x = held(mesh, X, spec)
        w = W.clone().requires_grad_() if plain else held(mesh, W, P())
        specs = in_specs
        if name != "nested" and not plain and in_specs[1] is None:
            specs = (in_specs[0], P())  # a ShardTensor has to have one
        elif plain and in_specs[1] is None:
            w = w.detach().requires_grad_(False)
        outs = called(name, local_map(
            inside, in_specs=specs, out_specs=out_specs, mesh=mesh, check=True), x, w)
        for out, due in zip(outs, dues):
            assert isinstance(out, ShardTensor)
            torch.testing.assert_close(out.full_tensor(), due)
        sum((out * out).sum() for out in outs).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(full(x.grad), wx.grad)
        if w.requires_grad:
            torch.testing.assert_close(full(w.grad), ww.grad)

    weft.testing.run(on_rank, mesh=MESH)


def test_blocks_may_be_ragged_and_results_of_new_lengths() -> None:
    def on_rank(mesh: Any) -> list[int]:
        with mesh:
            x = held(mesh, X, P("b"))

            @local_map(in_specs=P(("a", "b")), out_specs=P(("a", "b")))
            def some(block: Tensor) -> Tensor:
                return block[: collectives.axis_index("b")]

            y = some(x)
            y.sum().backward()
            kept = [at for at in range(7) if x.grad.full_tensor()[at].any()]
            torch.testing.assert_close(y.full_tensor(), X[kept])
            return kept

    # 7 rows: 4 over a, of which 2, 2, 0 over b; and 3, of which 1, 1, 1. Place j of b keeps j rows.
    assert weft.testing.run(on_rank, mesh=MESH) == [[2, 5, 6]] * 6


@ranks(**MESH)
def test_a_block_is_a_value_of_its_own(mesh: Any) -> None:
    """Writes to it reach no tensor outside, so replicas stay equal."""
    for spec in (P(), P("a")):
        x = weft.distribute_tensor(X, mesh, spec)
        y = local_map(
            lambda block: block.add_(mesh.rank), in_specs=spec, out_specs=P(("a", "b")),
            mesh=mesh)(x)
        torch.testing.assert_close(x.full_tensor(), X)
        assert y.shape[0] == 6 * X.shape[0] if spec == P() else True


def test_check_finds_results_that_differ() -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("a"))
        with pytest.raises(LayoutError) as told:
            local_map(
                lambda block: block.sum(), in_specs=P("a"), out_specs=P(), mesh=mesh, check=True)(x)
        return str(told.value)

    (told,) = {*weft.testing.run(on_rank, mesh=MESH)}
    first, *_, fix = told.splitlines()
    assert first == "local_map(<lambda>)(out_specs): 3 ranks contradict layout []."
    assert fix.startswith(  # not over b, where a sum would count its terms three times
        "  Fix: where ranks hold terms of a sum, collectives.psum(result, ('a',)) inside, or")


def mapped(fn: Any, in_specs: Any, out_specs: Any, mesh: Any) -> Any:
    return local_map(fn, in_specs=in_specs, out_specs=out_specs, mesh=mesh)


@pytest.mark.parametrize(("call", "kind", "said"), [
    (lambda x, m: mapped(lambda a: a, (P(), P()), P(), m)(x), LayoutError,
     "local_map(<lambda>)(in_specs): there are 2 specs and 1 arguments."),
    (lambda x, m: mapped(lambda a: (a, a), P(), (P(),) * 3, m)(x), LayoutError,
     "local_map(<lambda>)(out_specs): there are 3 specs and 2 results."),
    (lambda x, m: mapped(lambda a: a, None, P(), m)(x), ShardTypeError,
     "local_map(<lambda>): an argument without a spec holds 1 ShardTensors."),
    (lambda x, m: mapped(lambda a, b=None: a, P(), P(), m)(x, b=x), ShardTypeError,
     "local_map(<lambda>): an argument without a spec holds 1 ShardTensors."),
    (lambda x, m: mapped(lambda a: x, P(), P(), m)(x), ShardTypeError,
     "local_map(<lambda>)(out_specs): a result is a ShardTensor [7@a, 6]."),
    (lambda x, m: mapped(lambda a: a, [Partial(), Shard(0)], P(), m)(x), PlacementError,
     "local_map(<lambda>)(in_specs): a tensor of shape (7, 6) is asked for as [7@b, 6] partial("),
    (lambda x, m: mapped(lambda a: a, "a", P(), m)(x), ShardTypeError,
     "local_map(<lambda>)(in_specs): it is 'a'."),
    (lambda x, m: mapped(lambda a: x * a, P("a"), P(), m)(x), UnsupportedOpError,
     "__mul__: at "),
])
def test_bad_input(call: Any, kind: type[Exception], said: str) -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(kind) as told:
            call(weft.distribute_tensor(X, mesh, P("a")), mesh)
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len({text.splitlines()[0] for text in texts}) == 1
    assert texts[0].startswith(said), texts[0]


def test_a_spec_that_does_not_fit_says_for_what() -> None:
    def program(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("a"))
        with pytest.raises(PlacementError) as told:
            mapped(lambda a: a.sum(), P("a"), P("a"), mesh)(x)
        assert told.value.__notes__ == [
            "  in local_map(<lambda>)(out_specs), for the result of shape ()"]
        with pytest.raises(MeshError) as told:
            mapped(lambda a: a, P("c"), P("a"), mesh)(x)
        assert told.value.__notes__ == [
            "  in local_map(<lambda>)(in_specs), for the argument of shape (7, 6)"]

    weft.testing.run(program, mesh=MESH)


# By torch's names.


def test_what_follows_the_function_is_given_by_name() -> None:
    with pytest.raises(ShardTypeError) as told:
        local_map(torch.sin, P("a"), P("b"))  # type: ignore[arg-type]
    assert str(told.value) == """\
local_map(fn, ...): 2 positional arguments follow fn.
  Rule: torch's order is (out_placements, in_placements), JAX's is (in_specs, out_specs): what \
follows fn is given by name.
  Offenders: P('a'), P('b')
  Fix: local_map(fn, in_specs=..., out_specs=...), or in_placements=..., out_placements=..."""
    several: list[dict[str, Any]] = [
        {"func": torch.cos, "fn": torch.sin}, {"mesh": {"a": 2}, "device_mesh": {"a": 2}},
        {"in_specs": P(), "in_placements": [Shard(0)]},
        {"out_specs": P(), "in_placements": [Shard(0)]},
        {"out_specs": P(), "in_grad_placements": [Shard(0)]},
    ]
    for names in several:
        with pytest.raises(ShardTypeError):
            local_map(**names)


def test_torchs_example_of_local_map() -> None:
    """Column-wise W times row-wise X: the ranks' products are terms, which the function adds."""
    full_w, full_x = torch.arange(24.0).view(4, 6), torch.arange(18.0).view(6, 3)

    def on_rank(mesh: Any) -> None:
        def mm_allreduce(scale: float, pair: dict[str, Tensor], name: Any) -> tuple[Tensor, str]:
            assert type(pair["w"]) is type(pair["x"]) is Tensor
            assert pair["w"].shape == (4, 3)
            return collectives.psum(scale * pair["w"] @ pair["x"], "x"), name

        w = weft.distribute_tensor(full_w, mesh, [Shard(1)]).requires_grad_()
        x = weft.distribute_tensor(full_x, mesh, [torchs.Shard(0)]).requires_grad_()
        by_torchs_names: Any = local_map
        fn = by_torchs_names(
            func=mm_allreduce, out_placements=([torchs.Replicate()], None),
            in_placements=(None, [torchs.Shard(1)], (Shard(0),), None), device_mesh=mesh,
        )
        y, name = fn(2.0, {"w": w, "x": x}, "y")
        assert name == "y"
        assert torch.equal(y.full_tensor(), 2 * full_w @ full_x)
        (y * y).sum().backward()
        dw, dx = full_w.clone().requires_grad_(), full_x.clone().requires_grad_()
        ((2 * dw @ dx) ** 2).sum().backward()
        torch.testing.assert_close(full(w.grad), dw.grad)
        torch.testing.assert_close(full(x.grad), dx.grad)

    weft.testing.run(on_rank, mesh={"x": 2})


@ranks(**MESH)
def test_torchs_names_have_torchs_meaning(mesh: Any) -> None:
    x = held(mesh, X, P("a"))
    seen: list[Any] = []

    def look(block: Tensor, other: Any = None) -> Tensor:
        seen.append((tuple(block.shape), None if other is None else tuple(other.shape)))
        return block + 1

    # None takes each as it lies, and plain tensors are handed over as they are.
    y = local_map(look, out_placements=x.placements)(x, X)
    assert torch.equal(y.full_tensor(), X + 1)
    assert seen.pop() == (tuple(x.to_local().shape), (7, 6))
    local_map(look, in_placements=(x.placements, [Shard(0), Shard(0)]),
              out_placements=x.placements)(x, X)
    assert seen.pop()[1] == (7, 6)
    # Without a ShardTensor it is the function itself.
    assert type(local_map(look, out_placements=[Shard(0), Shard(1)])(X)) is Tensor
    # What lies otherwise is refused, or moved where that is asked for.
    there = [Replicate(), Shard(1)]
    with pytest.raises(LayoutError, match=r"leaf 0: \[7@a, 6\] for \[7, 6@b\]"):
        local_map(look, in_placements=(there,), out_placements=there)(x)
    moved = local_map(
        look, in_placements=(there,), out_placements=there, redistribute_inputs=True)(x)
    assert str(moved.sharding) == "[7, 6@b]"
    assert torch.equal(moved.full_tensor(), X + 1)
    with pytest.raises(ShardTypeError, match=r"leaf 0: \[7@a, 6\]"):
        local_map(look, in_placements=(None,), out_placements=there)(x)
    with pytest.raises(LayoutError, match="2 specs and 1 leaves of arguments"):
        local_map(look, in_placements=(there, there), out_placements=there)(x)
    # Ragged blocks lie as [Shard(0)] says.
    ragged = x.redistribute(placements=weft.Layout(mesh, (7, 6), P("a"), sizes={0: (1, 6)}))
    out = local_map(look, in_placements=([Shard(0), Replicate()],),
                    out_placements=[Shard(0), Replicate()])(ragged)
    assert out.sharding == ragged.sharding


@pytest.mark.parametrize("told", [None, Replicate(), Partial()], ids=str)
def test_in_grad_placements_say_what_gradients_mean(told: Any) -> None:
    """Of a weight that each rank uses on its own rows; without them it is the whole's gradient."""
    def on_rank(mesh: Any) -> Tensor:
        w = weft.distribute_tensor(W, mesh, [Replicate()]).requires_grad_()
        x = weft.distribute_tensor(X, mesh, [Shard(0)])
        y = local_map(
            torch.mm, in_placements=([Shard(0)], [Replicate()]), out_placements=[Shard(0)],
            in_grad_placements=None if told is None else ([Shard(0)], [told]),
        )(x, w)
        y.sum().backward()
        assert w.grad is not None
        return w.grad.to_local()

    whole = W.clone().requires_grad_()
    (X @ whole).sum().backward()
    assert whole.grad is not None
    found = weft.testing.run(on_rank, mesh={"x": 2})
    if isinstance(told, Replicate):  # each rank's own, as the caller says that they are equal
        torch.testing.assert_close(found[0] + found[1], whole.grad)
        assert not torch.equal(found[0], found[1])
    else:
        for one in found:
            torch.testing.assert_close(one, whole.grad)


@ranks(x=2)
def test_a_gradient_that_is_told_counts_as_torchs_does(mesh: Any) -> None:
    """All ranks compute the same, and each has the whole gradient."""
    w = weft.distribute_tensor(W, mesh, [Replicate()]).requires_grad_()
    for told in (None, ([Replicate()],)):
        y = local_map(
            torch.sin, in_placements=([Replicate()],), out_placements=[Replicate()],
            in_grad_placements=told)(w)
        (grad,) = torch.autograd.grad(y.sum(), w)
        assert torch.equal(grad.to_local(), W.cos())
