"""`local_map`: values and gradients are those of the same computation on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import (
    LayoutError,
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
        outs = called(name, local_map(inside, specs, out_specs, mesh, check=True), x, w)
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


def test_a_block_is_a_value_of_its_own() -> None:
    """Writes to it reach no tensor outside, so replicas stay equal."""
    def on_rank(mesh: Any) -> None:
        for spec in (P(), P("a")):
            x = weft.distribute_tensor(X, mesh, spec)
            y = local_map(lambda block: block.add_(mesh.rank), spec, P(("a", "b")), mesh)(x)
            torch.testing.assert_close(x.full_tensor(), X)
            assert y.shape[0] == 6 * X.shape[0] if spec == P() else True

    weft.testing.run(on_rank, mesh=MESH)


def test_check_finds_results_that_differ() -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("a"))
        with pytest.raises(LayoutError) as told:
            local_map(lambda block: block.sum(), P("a"), P(), mesh, check=True)(x)
        return str(told.value)

    assert len(set(weft.testing.run(on_rank, mesh=MESH))) == 1


@pytest.mark.parametrize(("call", "kind", "said"), [
    (lambda x, m: local_map(lambda a: a, (P(), P()), P(), m)(x), LayoutError,
     "local_map(<lambda>)(in_specs): there are 2 specs and 1 arguments."),
    (lambda x, m: local_map(lambda a: (a, a), P(), (P(),) * 3, m)(x), LayoutError,
     "local_map(<lambda>)(out_specs): there are 3 specs and 2 results."),
    (lambda x, m: local_map(lambda a: a, None, P(), m)(x), ShardTypeError,
     "local_map(<lambda>): an argument without a spec holds 1 ShardTensors."),
    (lambda x, m: local_map(lambda a, b=None: a, P(), P(), m)(x, b=x), ShardTypeError,
     "local_map(<lambda>): an argument without a spec holds 1 ShardTensors."),
    (lambda x, m: local_map(lambda a: x, P(), P(), m)(x), ShardTypeError,
     "local_map(<lambda>)(out_specs): a result is a ShardTensor [7@a, 6]."),
    (lambda x, m: local_map(lambda a: a, [Partial(), Shard(0)], P(), m)(x), PlacementError,
     "local_map(<lambda>)(in_specs): a tensor of shape (7, 6) is asked for as [7@b, 6] partial("),
    (lambda x, m: local_map(lambda a: a, "a", P(), m)(x), ShardTypeError,
     "local_map(<lambda>)(in_specs): it is 'a'."),
    (lambda x, m: local_map(lambda a: x * a, P("a"), P(), m)(x), UnsupportedOpError,
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
