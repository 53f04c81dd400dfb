"""Ready-made shardings and pinned activations: the layouts they ask for, the values of the module
on plain tensors, and no more communication than they name."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import held, ranks
from tests.oracle import check
from weft import Layout, P, Replicate, Shard, ShardTensor
from weft.errors import LayoutError, MeshError, ModuleError
from weft.nn import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
)

MESH = {"dp": 2, "tp": 2}
TOKENS = torch.tensor([[3, 0, 6, 2, 2], [1, 1, 4, 0, 5], [6, 5, 3, 0, 2]])


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens to a loss; vocabulary, hidden size and sequence do not divide by 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Block(6, 9) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


MEGATRON = {
    "token": VocabParallel("tp"), "head": VocabParallel("tp"),
    "layers.*.norm": SequenceParallel("tp"),
    "layers.*.up": ColwiseParallel("tp"), "layers.*.down": RowwiseParallel("tp"),
}


def layouts_in(module: nn.Module) -> dict[str, str]:
    """The layouts of what modules give, as a forward fills them in."""
    found: dict[str, str] = {}
    for name, inner in module.named_modules():
        inner.register_forward_hook(
            lambda _, inputs, out, name=name: found.__setitem__(name, str(out.sharding)))
    return found


def on_ranks(fn: Callable[[Any], Any]) -> list[Any]:
    return weft.testing.run(fn, 4, MESH)


def test_all_styles_together_train_as_the_plain_module() -> None:
    dense = Model()

    def on_rank(mesh: Any) -> Any:
        module = weft.distribute_module(
            copy.deepcopy(dense), mesh, shardings=MEGATRON,
            activations={"layers.*": P("dp", "tp"), "head": PrepareModuleInput(P("dp"))},
        )
        specs = {name: each.spec for name, each in module.named_parameters()}  # type: ignore
        seen = layouts_in(module)
        loss = module(weft.distribute_tensor(TOKENS, mesh, P("dp")))
        loss.backward()
        return specs, seen, loss.item(), {
            name: held(each.grad) for name, each in module.named_parameters()  # type: ignore
        }

    loss = dense(TOKENS)
    loss.backward()
    ranks = on_ranks(on_rank)
    specs, seen, _, _ = ranks[0]
    layer = {"norm.weight": P(), "norm.bias": P(), "up.weight": P("tp"), "up.bias": P("tp"),
             "down.weight": P(None, "tp"), "down.bias": P()}
    assert specs == {"token.weight": P("tp")} | {
        f"layers.{at}.{name}": spec for at in (0, 1) for name, spec in layer.items()}
    assert seen["layers.0"] == seen["layers.1"] == seen["layers.1.norm"] == "[3@dp, 5@tp, 6]"
    assert seen["layers.0.up"] == "[3@dp, 5, 9@tp]" and seen["head"] == "[3@dp, 5, 7@tp]"
    for _, _, value, _ in ranks:
        assert value == pytest.approx(loss.item(), abs=1e-6)
    for name, each in dense.named_parameters():
        assert each.grad is not None
        check(each.grad, [grads[name] for *_, grads in ranks], name)


def test_each_style_cuts_what_it_says() -> None:
    def on_rank(mesh: Any) -> Any:
        def specs(module: nn.Module, style: Any) -> dict[str, P]:
            weft.distribute_module(module, mesh, shardings={"": style})
            return {name: each.spec for name, each in module.named_parameters()}  # type: ignore

        column, row, words = ColwiseParallel("tp"), RowwiseParallel("dp"), VocabParallel("tp")
        rows, columns = P("tp"), P(None, "tp")
        both = {"weight": rows, "bias": rows}
        assert specs(nn.Linear(3, 4), column) == specs(nn.Bilinear(3, 4, 5), column) == both
        assert specs(nn.Conv2d(3, 4, 1), column) == specs(nn.Linear(3, 4), words) == both
        assert specs(nn.Embedding(5, 4), column) == specs(nn.EmbeddingBag(5, 4), column) == {
            "weight": columns}
        assert specs(nn.Linear(3, 4), row) == specs(nn.Conv1d(3, 4, 1), row) == {
            "weight": P(None, "dp"), "bias": P()}
        assert specs(nn.Embedding(5, 4), row) == {"weight": P("dp")}
        assert specs(nn.EmbeddingBag(5, 4), words) == {"weight": rows}
        assert specs(nn.LayerNorm(4), SequenceParallel("tp")) == {"weight": P(), "bias": P()}
        assert specs(nn.Linear(3, 4), ColwiseParallel(("tp", "dp")))["bias"] == P(("tp", "dp"))
        only = weft.init_mesh({"x": 4})
        module = weft.distribute_module(nn.Linear(3, 4), only, shardings={"": ColwiseParallel()})
        assert module.weight.spec == P("x")  # type: ignore[attr-defined]

    on_ranks(on_rank)


def test_styles_pin_what_they_are_told_along_their_axis() -> None:
    dense = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.arange(60.0).view(3, 5, 4)

    def on_rank(mesh: Any) -> Any:
        module = weft.distribute_module(copy.deepcopy(dense), mesh, shardings={
            "0": ColwiseParallel("tp", input_layouts=Replicate()),
            "2": RowwiseParallel("tp", output_layouts=Shard(1)),
        })
        entered: list[Any] = []
        module[0].register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0].sharding))
        out = module(weft.distribute_tensor(x, mesh, P("dp", "tp")))
        whole = weft.distribute_module(nn.Linear(4, 6), mesh, shardings={
            "": ColwiseParallel("tp", output_layouts=P("tp"))})(x)
        return str(entered[0]), held(out.detach()), str(whole.sharding), str(
            weft.nn.report(module)).splitlines()[-2:]

    ranks = on_ranks(on_rank)
    assert ranks[0][0] == "[3@dp, 5, 4]" and ranks[0][2] == "[3@tp, 5, 6]"
    assert str(ranks[0][1].layout) == "[3@dp, 5@tp, 4]"
    check(dense(x).detach(), [each for _, each, _, _ in ranks])
    assert ranks[0][3] == ["inputs of 0 pinned: tp replicates, by '0'",
                           "outputs of 2 pinned: tp shards dim 1, by '2'"]


def test_styles_where_they_do_not_fit() -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(MeshError, match=r"it names no axis, and .* has 2: dp, tp"):
            weft.distribute_module(nn.Linear(3, 4), mesh, shardings={"": ColwiseParallel()})
        for pattern, module in ("", nn.Linear(3, 4)), ("0", nn.Sequential(nn.Linear(3, 4))):
            style, key = ColwiseParallel("tp"), f"{pattern}.weight".removeprefix(".")
            with pytest.raises(LayoutError, match="1 patterns match parameters or bu") as error:
                weft.distribute_module(module, mesh, shardings={key: style})
            fix = str(error.value).splitlines()[-1]
            assert fix == f"  Fix: shardings={{{pattern!r}: ColwiseParallel('tp')}}"
        for pattern in ("0", "1"):  # without parameters of its own there is nothing to cut
            block = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(3, 4)))
            with pytest.raises(LayoutError, match="names of modules that have some"):
                weft.distribute_module(block, mesh, shardings={pattern: ColwiseParallel("tp")})
            weft.distribute_module(block, mesh, shardings={f"{pattern}*": VocabParallel("tp")} if (
                pattern == "1") else {"0": RowwiseParallel("tp", output_layouts=weft.Shard(0))})
        with pytest.raises(weft.PlacementError, match=r"is Shard\(dim\) or Replicate\(\)"):
            style = RowwiseParallel("tp", output_layouts=weft.Partial())
            weft.distribute_module(nn.Linear(3, 4), mesh, shardings={"": style})
        with pytest.raises(ModuleError) as caught:
            weft.distribute_module(nn.Sequential(nn.LayerNorm(3), nn.GRU(3, 4)), mesh,
                                   shardings={"1": RowwiseParallel("tp")})
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
shardings: RowwiseParallel('tp'): '1' is a GRU, with parameters of its own.
  Rule: the style shards Linear, Conv1d, Conv2d, Conv3d, Embedding, EmbeddingBag.
  Offenders: 1
  Fix: shardings={"1.weight": P(...)}"""


@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_stay_where_the_input_is_larger_than_they_are(checkpointed: bool) -> None:
    """Between blocks the sequence is sharded as the weights are: each norm's result is gathered
    once, for both layers that read it, and its gradient is reduce-scattered once."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate, self.up = nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(4, 5)
            self.down = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    torch.manual_seed(0)
    dense = Gated()
    x = torch.randn(3, 7, 4)
    whole = x.clone().requires_grad_()
    dense(whole).square().sum().backward()

    def on_rank(mesh: Any) -> Any:
        module = weft.distribute_module(copy.deepcopy(dense), mesh, shardings={
            "norm": SequenceParallel("tp"), "gate": ColwiseParallel("tp"),
            "up": ColwiseParallel("tp"),
            "down": RowwiseParallel("tp", output_layouts=Shard(1)),
        })
        given = weft.distribute_tensor(x, mesh, P(None, ("dp", "tp"))).requires_grad_()
        with weft.explain() as log:
            out = checkpoint(module, given, use_reentrant=False) if checkpointed else module(given)
            out.square().sum().backward()
        moved = [(one.collective, one.direction) for one in log.events
                 if one.collective in ("AllGather", "ReduceScatter", "Exchange")]
        grads: dict[str, Any] = {name: one.grad for name, one in module.named_parameters()}
        return str(out.sharding), moved, {
            name: held(one) for name, one in (("x", given.grad), *grads.items())}

    ranks = on_ranks(on_rank)
    layout, moved, _ = ranks[0]
    assert layout == "[3, 7@(dp,tp), 4]"
    forward = [("AllGather", "forward"), ("ReduceScatter", "forward")]
    back = [("AllGather", "backward"), ("ReduceScatter", "backward")]
    again = forward[:1] if checkpointed else []  # nothing saves what comes of the last collective
    assert moved == forward + again + back
    for name, each in (("x", whole), *dense.named_parameters()):
        assert each.grad is not None
        check(each.grad, [grads[name] for *_, grads in ranks], name)


def test_the_input_of_a_layer_comes_to_its_weight() -> None:
    torch.manual_seed(0)
    cases = [
        (nn.Linear(4, 3), ColwiseParallel("tp"), (2, 5, 4), P(None, "tp"), "[2, 5, 3@tp]"),
        (nn.Linear(4, 3), ColwiseParallel("tp"), (2, 5, 4), P(None, None, "tp"), "[2, 5, 3@tp]"),
        (nn.Linear(4, 3), RowwiseParallel("tp"), (2, 5, 4), P("dp", "tp"),
         "[2@dp, 5, 3] partial(sum@tp)"),
        (nn.Linear(4, 3), RowwiseParallel("tp"), (2, 5, 4), P(("dp", "tp")),
         "[2@(dp,tp), 5, 3]"),  # the batch is sharded as the weight is, which is gathered
        (nn.Conv1d(4, 3, 3), ColwiseParallel("tp"), (2, 4, 9), P(None, None, "tp"),
         "[2, 3@tp, 7]"),
        (nn.Conv1d(4, 3, 3), RowwiseParallel("tp"), (2, 4, 9), P("dp", None, "tp"),
         "[2@dp, 3, 7] partial(sum@tp)"),
        (nn.Conv1d(4, 3, 3), RowwiseParallel("tp"), (4, 9), P(None, "tp"),
         "[3, 7] partial(sum@tp)"),
    ]
    inputs = [torch.randn(shape, requires_grad=True) for _, _, shape, _, _ in cases]
    wanted = []
    for x, (dense, *_) in zip(inputs, cases):
        out = dense(x)
        out.square().sum().backward()
        wanted.append(out.detach())

    def on_rank(mesh: Any) -> Any:
        found = []
        for x, (dense, style, _, spec, _) in zip(inputs, cases):
            layer = copy.deepcopy(dense)
            layer.zero_grad()
            module = weft.distribute_module(layer, mesh, shardings={"": style})
            given = weft.distribute_tensor(x.detach(), mesh, spec).requires_grad_()
            out = module(given)
            layout = str(out.sharding)
            out.square().sum().backward()
            with torch.no_grad():
                again = held(module(given))
            found.append((layout, held(out.detach()), again, held(given.grad),
                          held(module.weight.grad)))
        return found

    ranks = on_ranks(on_rank)
    for at, (x, want, (dense, style, *_, layout)) in enumerate(zip(inputs, wanted, cases)):
        assert ranks[0][at][0] == layout, style
        for due, place in (want, 1), (want, 2), (x.grad, 3), (dense.weight.grad, 4):
            assert due is not None
            check(due, [found[at][place] for found in ranks], f"{dense} {style} {place}")


def test_sequence_parallel_leaves_what_else_cuts_its_input() -> None:
    def on_rank(mesh: Any) -> list[str]:
        module = weft.distribute_module(
            nn.LayerNorm(4), mesh, shardings={"": SequenceParallel("tp", sequence_dim=0)})
        found = []
        for layout in (
            P(None, "dp"), P("dp"), P("tp"), P(None, None, "tp"),
            P(None, "dp", partial={"tp": "sum"}),
            Layout(mesh, (5, 3, 4), [Replicate(), Shard(0, sizes=(1, 4))]),
        ):
            x = weft.ones(5, 3, 4, mesh=mesh, spec=layout)
            found.append(str(module(x).sharding))
        with pytest.raises(LayoutError, match="dim is 2, the activation is") as caught:
            style = SequenceParallel("tp", sequence_dim=2)
            weft.distribute_module(nn.Dropout(), mesh, shardings={"": style})(
                weft.ones(3, 4, mesh=mesh))
        assert caught.value.__notes__[0] == "  in distribute_module, for the input 0 of ''"
        return found

    assert on_ranks(on_rank)[0] == [
        "[5@tp, 3@dp, 4]", "[5@(dp,tp), 3, 4]", "[5@tp, 3, 4]", "[5@tp, 3, 4]", "[5@tp, 3@dp, 4]",
        "[5@tp{1,4}, 3, 4]",
    ]


class Several(NamedTuple):
    first: Any
    second: Tensor


class Gives(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, times: int = 1) -> Any:
        out = x * self.weight * times
        return self.kind(out if mask is None else out * mask)


@pytest.mark.parametrize("kind, pin, read", [
    (lambda x: x, P("dp", "tp"), lambda out: [out]),
    (lambda x: x, [Shard(0), Shard(1)], lambda out: [out]),
    (lambda x: (x, 2), P("dp", "tp"), lambda out: [out[0]]),
    (lambda x: [None, x], P("dp", "tp"), lambda out: [out[1]]),
    (lambda x: Several(x, x + 1), PrepareModuleOutput(P("dp", "tp"), P("dp", "tp")),
     lambda out: [out.first, out.second]),
    (lambda x: {"n": 1, "x": x}, P("dp", "tp"), lambda out: [out["x"]]),
    (lambda x: {"y": x + 1, "x": x}, PrepareModuleOutput(x=P("dp", "tp"), y=P("dp", "tp")),
     lambda out: [out["x"], out["y"]]),
])
def test_outputs_of_every_kind_are_pinned(kind: Any, pin: Any, read: Any) -> None:
    x = torch.arange(12.0).view(3, 4)

    def on_rank(mesh: Any) -> Any:
        module = weft.distribute_module(Gives(kind), mesh, activations={"": pin})
        out = module(x)
        assert isinstance(out, type(kind(x)))
        return [held(one) for one in map(torch.Tensor.detach, read(out))]

    ranks = on_ranks(on_rank)
    for place, expected in enumerate(read(kind(x))):
        assert str(ranks[0][place].layout) == "[3@dp, 4@tp]"
        check(expected, [mine[place] for mine in ranks])


def test_inputs_are_pinned_by_position_and_name() -> None:
    def on_rank(mesh: Any) -> list[str]:
        pin = PrepareModuleInput(P("dp"), mask=P(None, "tp"), other=P("dp"))
        seen: list[Any] = []
        inner = Gives(lambda x: x)
        inner.register_forward_pre_hook(lambda *_: seen.append("kept"))
        module = weft.distribute_module(
            nn.ModuleDict({"a": inner, "b": nn.Identity()}), mesh, activations={"a": pin})
        inner.register_forward_pre_hook(
            lambda _, args, kwargs: seen.extend([args[0], kwargs["mask"], kwargs["times"]]),
            with_kwargs=True)
        out = module["a"](torch.ones(3, 4), mask=torch.ones(3, 4), times=2)
        laid = [str(one.sharding) for one in (seen[1], seen[2], out)]
        return [seen[0], *laid[:2], str(seen[3]), laid[2]]

    assert on_ranks(on_rank)[0] == ["kept", "[3@dp, 4]", "[3, 4@tp]", "2", "[3@dp, 4@tp]"]


def test_of_modules_within_each_other_the_outermost_is_pinned() -> None:
    def on_rank(mesh: Any) -> dict[str, str]:
        module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        weft.distribute_module(module, mesh, activations={"1": P(), "?*": P("dp", "tp")})
        pins = {pin.path: repr(pin.pin) for pin in weft.nn.report(module).pins}
        assert len(pins) == 2
        return pins

    assert on_ranks(on_rank)[0] == {"0": "PrepareModuleOutput(P('dp', 'tp'))",
                                    "1": "PrepareModuleOutput(P())"}


def test_a_module_with_several_names_is_pinned_once_by_any_of_them() -> None:
    def on_rank(mesh: Any) -> list[Any]:
        out = []
        for pattern in ("0", "1", "*"):
            layer = nn.Linear(4, 4)
            module = weft.distribute_module(
                nn.Sequential(layer, layer), mesh, activations={pattern: P("dp")})
            pins = weft.nn.report(module).pins
            out.append((module(torch.ones(4, 4)).sharding.dims, len(pins)))
        return out

    assert on_ranks(on_rank)[0] == [(((0,), ()), 1)] * 3


def test_pins_that_cannot_be() -> None:
    def on_rank(mesh: Any) -> list[str]:
        texts = []
        with pytest.raises(LayoutError) as caught:
            weft.distribute_module(nn.Sequential(nn.ReLU()), mesh, activations={"mlp": P("dp")})
        texts.append(str(caught.value))
        pin = P(None, None, "dp")
        module = weft.distribute_module(nn.Linear(4, 4), mesh, activations={"": pin})
        with pytest.raises(weft.WeftError) as fits:
            module(torch.ones(3, 4))
        texts += fits.value.__notes__[:1]
        for kind in (lambda x: "none", lambda x: (1, 2), lambda x: {}):
            module = weft.distribute_module(Gives(kind), mesh, activations={"": P("dp")})
            with pytest.raises(ModuleError) as none:
                module(torch.ones(3, 4))
        texts.append(str(none.value))
        return texts

    assert on_ranks(on_rank)[0] == ["""\
distribute_module(activations=): 1 of 1 patterns match none of the 1 names of modules: 0.
  Rule: every pattern matches at least one module.
  Offenders: 'mlp'
  Fix: print([name for name, _ in module.named_modules()])""",
        "  in distribute_module, for the output of ''", """\
distribute_module(activations=): PrepareModuleOutput(P('dp')) for the output of '', which is dict \
of 0: nothing.
  Rule: each spec is for a tensor that is there.
  Offenders: output of ''
  Fix: PrepareModuleOutput(P(...), None) for a tuple, by name for a map: \
PrepareModuleOutput(logits=P(...))"""]


@pytest.mark.parametrize("pin, names", [
    (PrepareModuleInput, {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}),
    (PrepareModuleInput, {"input_kwarg_layouts": {"mask": Shard(1)}}),
    (PrepareModuleOutput, {"output_layouts": Replicate(), "desired_output_layouts": Shard(0)}),
])
def test_torchs_names_of_layouts_are_not_names_of_inputs(pin: Any, names: Any) -> None:
    with pytest.raises(weft.ShardTypeError, match=rf"{pin.__name__}\({next(iter(names))}=\)"):
        pin(**names)


@pytest.mark.parametrize("pin", [
    PrepareModuleOutput([Replicate(), Replicate()], [Replicate(), Shard(0)]),
    PrepareModuleOutput(logits=P("dp")),
])
def test_a_single_tensor_has_one_spec(pin: Any) -> None:
    def on_rank(mesh: Any) -> str:
        module = weft.distribute_module(nn.Linear(4, 4), mesh, activations={"": pin})
        with pytest.raises(ModuleError) as caught:
            module(torch.ones(3, 4))
        return str(caught.value)

    assert f"{pin!r} for the output of ''" in on_ranks(on_rank)[0]


@ranks(**MESH)
def test_a_style_where_a_function_or_a_table_stands(mesh: Any) -> None:
    told = re.escape('shardings={"": ColwiseParallel(\'tp\')}')
    module, style = nn.Linear(4, 4), ColwiseParallel("tp")
    with pytest.raises(weft.ShardTypeError, match=told):
        weft.distribute_module(module, mesh, style)  # type: ignore[arg-type]
    with pytest.raises(weft.ShardTypeError, match=told):
        weft.distribute_module(module, mesh, shardings=style)  # type: ignore[arg-type]
    weft.distribute_module(module, mesh, shardings={"": style})
    assert str(cast(Any, module.weight).sharding) == "[4@tp, 4]"


@ranks(**MESH)
def test_pins_survive_copies_and_pickles(mesh: Any) -> None:
    module = weft.distribute_module(
        nn.Linear(4, 4), mesh, input_fn=laid_out, activations={"": P("dp", "tp")})
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.weight is not module.weight
        out = other(torch.ones(3, 4))
        assert type(out) is ShardTensor and out.spec == P("dp", "tp")
        assert out.device_mesh is mesh


def laid_out(module: nn.Module, inputs: Any, mesh: Any) -> Any:
    return tuple(weft.distribute_tensor(one, mesh, P("dp")) for one in inputs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_pins_within_checkpoints_and_accumulated_gradients(use_reentrant: bool) -> None:
    class Checkpointed(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.token(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return self.head(x).logsumexp(-1).mean()

    dense = Checkpointed()

    def twice(module: nn.Module, tokens: Tensor) -> None:
        for part in (tokens, tokens.flip(1)):
            module(part).backward()

    def on_rank(mesh: Any) -> Any:
        module = weft.distribute_module(
            copy.deepcopy(dense), mesh, shardings=MEGATRON, activations={
                "layers.*": P("dp", "tp"), "layers.*.up": P("dp", None, "tp")})
        twice(module, weft.distribute_tensor(TOKENS, mesh, P("dp")))
        return {name: held(each.grad) for name, each in module.named_parameters()}  # type: ignore

    ranks = on_ranks(on_rank)
    twice(dense, TOKENS)
    for name, each in dense.named_parameters():
        assert each.grad is not None
        check(each.grad, [grads[name] for grads in ranks], name)


def test_a_pin_is_asked_for_so_strict_mode_lets_it_pass() -> None:
    def on_rank(mesh: Any) -> list[Any]:
        module = weft.distribute_module(
            nn.Linear(4, 4), mesh, shardings={"weight": P("tp"), "bias": P("tp")},
            activations={"": P("dp", "tp")})
        with weft.strict(), weft.explain() as log:
            module(weft.ones(4, 4, mesh=mesh, spec=P("dp")))
        silent = len(log.events)
        module = weft.distribute_module(
            nn.Linear(4, 4), mesh, shardings={"": ColwiseParallel("tp")}, activations={"": P("dp")})
        with weft.strict(), weft.explain() as log:
            module(weft.ones(4, 4, mesh=mesh, spec=P("dp")))
        return [silent, [(event.op, event.nbytes, event.reason) for event in log.events]]

    assert on_ranks(on_rank)[0] == [0, [("redistribute", 16, "asked for")]]
