"""torch's `flex_attention`: functions of scores and masks see positions in the whole, on any
layout. torch has no gradient of it on CPUs but for its check of the device, which is lifted here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import weft
from weft import Layout, P, UnsupportedOpError

BATCH, HEADS, LENGTH = 3, 4, 70
DOCUMENTS = torch.arange(LENGTH) // 13
SAMPLES = torch.randint(3, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
Make = Callable[[Tensor, str], Tensor]

flex_attention: Any = flex.flex_attention

pytestmark = [pytest.mark.filterwarnings(f"ignore:{one}") for one in (
    "flex_attention called without torch.compile", "The .grad attribute",
    r"(?s).*a compiled function uses a ShardTensor")]


@pytest.fixture(autouse=True)
def _with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    # Where a call with equal operands follows one whose functions close over tensors, it raises.
    torch._dynamo.reset()


def causal(b: Any, h: Any, row: Any, column: Any) -> Any:
    return row >= column


def _mask(name: str, make: Make) -> Any:
    """What a mask's function closes over, too, comes from `make`."""
    documents, samples = make(DOCUMENTS, "documents"), make(SAMPLES, "samples")
    functions: dict[str, Any] = {
        "causal": (causal, None, None),
        "documents": (lambda b, h, i, j: documents[i] == documents[j], None, HEADS),
        "samples": (lambda b, h, i, j: (samples[b, i] == samples[b, j]) | (i == j), BATCH, None),
    }
    if name not in functions:
        return None
    function, batch, heads = functions[name]
    return create_block_mask(
        function, batch, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


def _scaled(score: Any, b: Any, h: Any, i: Any, j: Any, *, scale: Tensor) -> Any:
    return score * scale[h]


def _scores(name: str, make: Make) -> Any:
    slopes = make(torch.linspace(0.5, 2, HEADS, dtype=torch.float64), "slopes")
    functions: dict[str, Any] = {
        "distance": lambda score, b, h, i, j: score - (i - j).abs() * 0.1 * (h + 1),
        "slopes": lambda score, b, h, i, j: score * slopes[h] + b,
        "default": lambda score, b, h, i, j, scale=slopes: score * scale[h],
        "keyword": partial(_scaled, scale=slopes),
    }
    return functions.get(name)


def attended(make: Make, mask: str, scores: str, kv_heads: int) -> list[Any]:
    """The result, the logs of the rows' sums, and gradients; rows are turned in memory."""
    draw = torch.Generator().manual_seed(1)
    given = [
        make(torch.randn(BATCH, LENGTH, heads, 8, generator=draw, dtype=torch.float64), name)
        for name, heads in (("query", HEADS), ("key", kv_heads), ("value", kv_heads))
    ]
    q, k, v = (one.requires_grad_().transpose(1, 2) for one in given)
    out, more = flex_attention(
        q, k, v, _scores(scores, make), _mask(mask, make), enable_gqa=kv_heads != HEADS,
        return_aux=flex.AuxRequest(lse=True))
    loss = (out.square().sum() + more.lse.sum())
    loss.backward()
    assert out.stride() == torch.empty(BATCH, LENGTH, HEADS, 8).transpose(1, 2).stride()
    return [out.detach(), more.lse.detach(), *[one.grad for one in given]]


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "samples": ({"x": 4}, {"query": P("x"), "key": P("x"), "value": P("x"), "samples": P("x")}),
    "heads": ({"x": 2}, {name: P(None, None, "x") for name in ("query", "key", "value")}),
    "rows": ({"x": 3}, {"query": P(None, "x"), "key": P(None, "x"), "value": P(None, "x"),
                        "documents": P("x"), "samples": P(None, "x")}),
    "ragged rows": ({"x": 4}, {"query": (3, 0, 50, 17), "key": P(None, "x")}),
    "rows x heads": ({"x": 2, "y": 2}, {"query": P(None, "x", "y"), "key": P(None, "x"),
                                        "value": P("y"), "slopes": P("x")}),
    "features": ({"x": 2}, {"query": P(None, None, None, "x"), "value": P(None, None, None, "x")}),
    "keys alone": ({"x": 2}, {"key": P(None, "x"), "value": P(None, "x")}),
}


def _made(mesh: Any, specs: dict[str, Any]) -> Make:
    def make(full: Tensor, name: str) -> Tensor:
        spec = specs.get(name, P())
        if type(spec) is tuple:
            spec = Layout(mesh, full.shape, P(None, "x"), sizes={1: spec})
        return weft.distribute_tensor(full, mesh, spec)

    return make


FUNCTIONS = [("none", "none", 1), ("documents", "slopes", 2), ("causal", "distance", 4),
             ("samples", "none", 2)]
CASES = [(way, *FUNCTIONS[at % 4]) for at, way in enumerate(LAYOUTS)]
CASES += [("rows", *FUNCTIONS[3]), ("ragged rows", *FUNCTIONS[1])]
CASES += [("rows x heads", "none", "default", 2), ("rows x heads", "none", "keyword", 2)]


@pytest.mark.parametrize(("way", "mask", "scores", "kv_heads"), CASES)
def test_as_one_process(way: str, mask: str, scores: str, kv_heads: int) -> None:
    axes, specs = LAYOUTS[way]
    due = attended(lambda full, name: full.clone(), mask, scores, kv_heads)

    def on_rank(mesh: Any) -> list[Tensor]:
        found = attended(_made(mesh, specs), mask, scores, kv_heads)
        return [one.full_tensor() for one in found]

    for found in weft.testing.run(on_rank, mesh=axes):
        torch.testing.assert_close(found, due, rtol=1e-6, atol=1e-7)  # logs are in float32


def test_what_scores_close_over_gets_its_whole_gradient() -> None:
    due, found = torch.ones(HEADS, dtype=torch.float64), []
    x = torch.randn(2, HEADS, 32, 8, generator=torch.Generator().manual_seed(2))

    def loss(slopes: Tensor, x: Tensor) -> None:
        out = flex_attention(x, x, x, lambda score, b, h, i, j: score * slopes[h])
        out.square().sum().backward()

    loss(due.requires_grad_(), x)

    def on_rank(mesh: Any) -> None:
        slopes = weft.ones(HEADS, mesh=mesh, dtype=torch.float64).requires_grad_()
        loss(slopes, weft.distribute_tensor(x, mesh, P("x", None, "y")))
        assert slopes.grad is not None
        found.append(slopes.grad.full_tensor())

    weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
    for one in found:
        torch.testing.assert_close(one, due.grad)


class Attention(nn.Module):
    """Its function of scores closes over a parameter, which is gathered while the module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.slopes = nn.Linear(8, 24), nn.Parameter(torch.linspace(0.5, 2, 2))

    def forward(self, x: Any) -> Any:
        slopes = self.slopes
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        out = flex_attention(q, k, v, lambda score, b, h, i, j: score * slopes[h])
        return x + out.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_parameters_that_are_gathered_for_their_module(spec: P) -> None:
    def gradients(model: Any, x: Any) -> dict[str, Any]:
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
        return {name: one.grad for name, one in model.named_parameters()}

    torch.manual_seed(0)
    plain = nn.Sequential(Attention(), Attention()).double()
    x = torch.randn(4, 12, 8, dtype=torch.float64)
    sharded = copy.deepcopy(plain)
    due = gradients(plain, x)

    def on_rank(mesh: Any) -> dict[str, Any]:
        model = weft.distribute_module(copy.deepcopy(sharded), mesh, shardings={"*": P("x")})
        found = gradients(model, weft.distribute_tensor(x, mesh, spec))
        return {name: one.full_tensor() for name, one in found.items()}

    for found in weft.testing.run(on_rank, mesh={"x": 3}):
        torch.testing.assert_close(found, due)


def test_what_moves() -> None:
    """Of shards of the sequence keys and values, or what exchanges heads for it; of shards of
    samples nothing, and of the mask its samples, once for all layers."""
    x = torch.randn(4, 2, 64, 8)

    def moved(mesh: Any, spec: P) -> list[tuple[str, int]]:
        samples = weft.distribute_tensor(torch.zeros(4, 64, dtype=torch.int64), mesh, P("x"))
        mask = create_block_mask(
            lambda b, h, i, j: samples[b, i] == samples[b, j], 4, None, 64, 64,
            "cpu", BLOCK_SIZE=32)
        given = [weft.distribute_tensor(x + at, mesh, spec) for at in range(3)]
        flex_attention(*given, block_mask=mask)
        with weft.explain() as log:
            flex_attention(*given, block_mask=mask)
        return [(event.collective, event.nbytes) for event in log.events]

    whole = 4 * 2 * 64 * 8 * 4
    assert weft.testing.run(lambda mesh: moved(mesh, P("x")), mesh={"x": 4})[0] == []
    tokens = weft.testing.run(lambda mesh: moved(mesh, P(None, None, "x")), mesh={"x": 4})[0]
    assert sum(nbytes for _, nbytes in tokens) <= 3 * whole / 4 * 3 / 4


def test_what_is_kept_of_a_mask_ends_with_it() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.ones(2, 2, 32, 8, mesh=mesh, spec=P(None, None, "x"))

        def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i >= j

        mask = create_block_mask(mod, None, None, 32, 32, "cpu", BLOCK_SIZE=16)
        flex_attention(x, x, x, block_mask=mask)
        kept = mesh.cache["masks"]
        assert len(kept) == 1
        del mask
        assert not len(kept)

    weft.testing.run(on_rank, mesh={"x": 2})


def test_a_mask_without_a_function_has_whole_blocks_on_each_rank() -> None:
    x = torch.randn(1, 1, 64, 8)
    num, which = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(num, which, BLOCK_SIZE=16, seq_lengths=(64, 64))

    def on_rank(mesh: Any, sizes: Any) -> Tensor:
        layout = Layout(mesh, x.shape, P(None, None, "x"), sizes={2: sizes})
        given = weft.distribute_tensor(x, mesh, layout)
        return flex_attention(given, x, x, block_mask=mask).full_tensor()  # type: ignore[no-any-return]

    due = flex_attention(x, x, x, block_mask=mask)
    for found in weft.testing.run(lambda mesh: on_rank(mesh, (48, 16)), mesh={"x": 2}):
        torch.testing.assert_close(found, due)
    with pytest.raises(UnsupportedOpError, match="blocks of 16 rows"):
        weft.testing.run(lambda mesh: on_rank(mesh, (40, 24)), mesh={"x": 2})


@pytest.mark.parametrize("compiled", ["kernel", "around"])
def test_compiled(compiled: str) -> None:
    """The kernel that ranks run is compiled as the caller's is, also without a gradient."""
    seen = []

    def backend(graph: Any, example: Any) -> Any:
        seen.extend([node.name for node in graph.graph.nodes if "flex_attention" in node.name])
        return graph.forward

    function = torch.compile(flex_attention if compiled == "kernel" else (
        lambda q, k, v: flex_attention(q * 1, k, v)), backend=backend)
    x = torch.randn(2, 2, 32, 8)
    due = flex_attention(x, x, x)

    def on_rank(mesh: Any) -> Tensor:
        return function(*[weft.distribute_tensor(x, mesh, P(None, None, "x"))] * 3).full_tensor()

    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        torch.testing.assert_close(found, due)
    assert seen


def test_an_error_of_a_function_reaches_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's flag nothing is compiled: after an error in what is, Python frees tensors later.
    """
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def wrong(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        raise ValueError("no such bias")

    def on_rank(mesh: Any) -> None:
        x = weft.ones(2, 2, 8, 4, mesh=mesh, spec=P("x"))  # two ranks hold nothing
        with pytest.raises((RuntimeError, ValueError, weft.CommunicationError)):
            flex_attention(x, x, x, wrong).full_tensor()

    weft.testing.run(on_rank, mesh={"x": 4})


def test_outside_of_the_mesh() -> None:
    x = torch.randn(2, 2, 32, 8)
    due = x.clone().requires_grad_()
    flex_attention(due, x, x).square().sum().backward()

    def on_rank(world: Any) -> Tensor:
        half = weft.init_mesh({"x": 2}, ranks=(0, 1))
        given = weft.distribute_tensor(x, half, P(None, None, "x")).requires_grad_()
        out = flex_attention(given, x, x).redistribute(world, P("x"))
        out.square().sum().backward()
        assert given.grad is not None
        return given.grad.redistribute(world, P()).to_local()

    for found in weft.testing.run(on_rank, mesh={"x": 3}):
        torch.testing.assert_close(found, due.grad)


def test_dry_run() -> None:
    """It takes as much memory as torch's other attention."""
    def peak(attend: Callable[..., Any]) -> int:
        def train(mesh: Any) -> None:
            given = weft.rand(8, 2, 256, 16, mesh=mesh, spec=P("x")).requires_grad_()
            attend(given, given, given).sum().backward()

        return weft.dry_run(train, {"x": 8}).memory.peak

    assert peak(flex_attention) <= 1.01 * peak(F.scaled_dot_product_attention)
