"""What modules do, done with distributed ones: states, copies, dtypes, hooks, parametrizations.

The same module on plain tensors, in one process, says what is right.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import weft
from tests.harness import held, ranks
from tests.oracle import check
from weft import P, Replicate, Shard, ShardTensor
from weft.errors import ModuleError

MESH = {"dp": 2, "tp": 2}


class Net(nn.Module):
    """A weight under two names, one used twice, a frozen one, buffers kept and not kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 6)
        self.turn = nn.Linear(6, 6, bias=False)
        self.again = self.turn
        self.last.bias.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0, 1, 6))
        self.register_buffer("shift", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(torch.tanh(self.first(x))) * self.scale
        return self.again(F.relu(self.turn(x))) + self.get_buffer("shift")


SHARDINGS: dict[str, Any] = {
    "first.*": P("tp"), "last.weight": [Replicate(), Shard(1, sizes=(7, 2))],
    "turn.weight": P("dp"), "s*": P("tp"),
}


EMPTY: dict[str, Any] = {
    "first.*": [Shard(0, sizes=(9, 0)), Replicate()], "last.weight": P(("tp", "dp")),
    "turn.weight": [Shard(1, sizes=(0, 6)), Shard(0)], "last.bias": P(("dp", "tp")), "s*": P("tp"),
}
"""Some ranks hold nothing of some tensors; of others each rank holds another piece."""


def distributed(module: nn.Module, mesh: Any, shardings: Mapping[str, Any] = SHARDINGS) -> Any:
    return weft.distribute_module(copy.deepcopy(module), mesh, shardings=shardings)


def on_ranks(fn: Callable[[Any], Any]) -> list[Any]:
    return weft.testing.run(fn, 4, MESH)


def tensors_of(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def layouts(module: nn.Module) -> dict[str, Any]:
    return {name: each.sharding for name, each in tensors_of(module).items()}


def assert_as(module: nn.Module, dense: nn.Module) -> None:
    """The same names in the same order, values, dtypes, flags."""
    mine, theirs = tensors_of(module), tensors_of(dense)
    assert list(mine) == list(theirs)
    assert list(module.state_dict()) == list(dense.state_dict())
    for name, each in theirs.items():
        one = mine[name]
        assert type(one) is ShardTensor and isinstance(one, nn.Parameter) == isinstance(
            each, nn.Parameter), name
        assert (one.dtype, one.requires_grad, one.shape) == (
            each.dtype, each.requires_grad, each.shape), name
        torch.testing.assert_close(
            one.detach().full_tensor(), each.detach(), rtol=0, atol=0, msg=name)


def other_state(dense: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() + 1 for name, each in dense.state_dict().items()}


X = torch.linspace(-1, 1, 30).view(5, 6)


@pytest.mark.parametrize("kind", ["full", "as they lie", "of other layouts", "on other meshes"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("shardings", [SHARDINGS, EMPTY], ids=["uneven", "empty"])
def test_state_dicts_of_every_kind_are_loaded(
    kind: str, assign: bool, shardings: dict[str, Any]
) -> None:
    dense = Net()
    state = other_state(dense)

    def on_rank(mesh: Any) -> None:
        module = distributed(dense, mesh, shardings)
        before, parameters = layouts(module), list(module.parameters())
        other = weft.init_mesh({"x": 4})

        def given(name: str, each: Tensor) -> Tensor:
            match kind:
                case "full":
                    return each.clone()
                case "as they lie":
                    return weft.distribute_tensor(each, mesh, module.state_dict()[name].sharding)
                case "of other layouts":
                    return weft.distribute_tensor(each, mesh, P("dp" if each.ndim == 1 else "tp"))
            return weft.distribute_tensor(each, other, P("x"))

        loaded = {name: given(name, each) for name, each in state.items()}
        if kind == "on other meshes" and not assign:
            with pytest.raises(RuntimeError, match="exception occurred"):
                module.load_state_dict(loaded, assign=assign)
            loaded = {name: each.redistribute(mesh, P())  # type: ignore[attr-defined]
                      for name, each in loaded.items()}
        answer = module.load_state_dict(loaded, assign=assign)
        assert not answer.missing_keys and not answer.unexpected_keys
        full = copy.deepcopy(dense)
        full.load_state_dict(state)
        assert_as(module, full)
        assert module.turn is module.again
        if assign and kind in ("of other layouts", "on other meshes"):
            for name, each in loaded.items():
                assert module.state_dict()[name].sharding == each.sharding  # type: ignore
            return
        assert layouts(module) == before
        if not assign:
            assert all(one is two for one, two in zip(module.parameters(), parameters))

    on_ranks(on_rank)


def test_assigned_tensors_keep_their_dtype_and_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)
            self.head.weight = self.token.weight

    dense = Tied()
    state = {name: each.double() + 1 for name, each in dense.state_dict().items()}

    def on_rank(mesh: Any) -> None:
        module = distributed(dense, mesh, {"token.*": P("tp")})
        module.load_state_dict(state, assign=True)
        assert module.token.weight is module.head.weight
        assert str(module.token.weight.sharding) == "[7@tp, 5]"
        assert_as(module, _loaded(dense, state))
        given = {name: weft.distribute_tensor(each, mesh, P("dp")) for name, each in state.items()}
        module.load_state_dict(given, assign=True)
        assert module.token.weight is module.head.weight
        assert str(module.token.weight.sharding) == "[7@dp, 5]"

    on_ranks(on_rank)


def _loaded(dense: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    made = copy.deepcopy(dense).to(next(iter(state.values())).dtype)
    made.load_state_dict(state)
    return made


def test_state_dicts_that_do_not_fit() -> None:
    def on_rank(mesh: Any) -> tuple[str, str]:
        module = distributed(Net(), mesh)
        blocks = {name: each.to_local() for name, each in module.state_dict().items()}
        with pytest.raises(RuntimeError) as caught:  # which torch raises
            module.load_state_dict(blocks)
        assert isinstance(caught.value, ModuleError)
        state = Net().state_dict()
        wrong = dict(state, scale=torch.ones(4))
        with pytest.raises(ModuleError) as one:
            module.load_state_dict(wrong, strict=False)
        del state["scale"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"scale"') as missing:
            module.load_state_dict(state)
        assert not isinstance(missing.value, ModuleError)
        assert module.load_state_dict(state, strict=False).missing_keys == ["scale"]
        return str(caught.value), str(one.value)

    blocks, one = on_ranks(on_rank)[0]
    assert blocks == """\
load_state_dict(state_dict): 6 of 7 tensors have another shape than those of the Net.
  Rule: a state dict holds full tensors, or ShardTensors, of the global shape.
  Offenders: scale: (3,), not (6,) ([6@tp]), first.weight: (5, 6), not (9, 6) ([9@tp, 6]), \
first.bias: (5,), not (9,) ([9@tp]), last.weight: (6, 7), not (6, 9) ([6, 9@tp{7,2}]), \
turn.weight: (3, 6), not (6, 6) ([6@dp, 6]), again.weight: (3, 6), not (6, 6) ([6@dp, 6])
  Fix: weft.ShardTensor.from_local(block, mesh, module.state_dict()['scale'].sharding), where a \
block of a rank was meant"""
    assert one.endswith("""\
1 of 7 tensors have another shape than those of the Net.
  Rule: a state dict holds full tensors, or ShardTensors, of the global shape.
  Offenders: scale: (4,), not (6,) ([6@tp])
  Fix: {name: x.full_tensor() for name, x in module.state_dict().items()} is what is loaded""")


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.bfloat16(),
    "to a dtype": lambda module: module.to(torch.float64),
    "to the same": lambda module: module.to(torch.float32),
    "to a device": lambda module: module.to("cpu"),
    "to both": lambda module: module.to(device="cpu", dtype=torch.float64),
    "to as another tensor": lambda module: module.to(torch.ones(1, dtype=torch.float64)),
    "cpu": lambda module: module.cpu(),
    "type": lambda module: module.type(torch.float64),
    "requires_grad_": lambda module: module.requires_grad_(False),
    "and again": lambda module: module.requires_grad_(False).requires_grad_(),
    "apply": lambda module: module.apply(initialized),
    "data": lambda module: [each.data.mul_(3) for each in module.parameters()],
    "no_grad": lambda module: torch._foreach_add_([each.data for each in module.parameters()], 1),
}


@ranks(**MESH)
def test_to_as_a_shard_tensor(mesh: Any) -> None:
    other = weft.ones(2, mesh=mesh, spec=P("tp"), dtype=torch.float64)
    for module in (distributed(Net(), mesh), Net()):
        before = [each.detach().clone() for each in module.parameters()]
        assert module.to(other) is module
        assert all(each.dtype is torch.float64 and not each.is_meta
                   for each in module.state_dict().values())
        for one, two in zip(module.parameters(), before):
            assert torch.equal(one, two.double())


def initialized(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 2)


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_those_of_the_plain_module(name: str) -> None:
    dense = Net()

    def on_rank(mesh: Any) -> None:
        module, plain = distributed(dense, mesh), copy.deepcopy(dense)
        parameters, before = list(module.parameters()), layouts(module)
        module(X).square().sum().backward()
        plain(X).square().sum().backward()
        CHANGES[name](module)
        CHANGES[name](plain)
        assert_as(module, plain)
        assert layouts(module) == before
        assert all(one is two for one, two in zip(module.parameters(), parameters))
        for one, two in zip(module.parameters(), plain.parameters()):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is not None:
                assert one.grad.dtype == two.grad.dtype and one.grad.sharding == one.sharding
                eps = max(torch.finfo(two.grad.dtype).eps, 1e-5)  # they are of float32, cast
                torch.testing.assert_close(one.grad.full_tensor(), two.grad, rtol=eps, atol=1e-5)
        module.zero_grad()
        assert all(each.grad is None for each in module.parameters())

    on_ranks(on_rank)


@pytest.mark.parametrize("copied", [
    copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module)),
    lambda module: torch_saved(module),
], ids=["deepcopy", "copy", "pickle", "torch.save"])
@pytest.mark.parametrize("shardings", [SHARDINGS, EMPTY], ids=["uneven", "empty"])
def test_copies(copied: Callable[[Any], Any], shardings: dict[str, Any]) -> None:
    dense = Net().eval()
    dense.register_forward_hook(doubled)

    def on_rank(mesh: Any) -> None:
        module = distributed(dense, mesh, shardings)
        other = copied(module)
        assert_as(other, dense)
        assert layouts(other) == layouts(module) and other.turn is other.again
        assert not other.training and str(weft.nn.report(other)) == str(weft.nn.report(module))
        shares = other.first.weight is module.first.weight
        assert shares == (copied is copy.copy)
        torch.testing.assert_close(other(X).full_tensor(), dense(X))

    on_ranks(on_rank)


def doubled(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return out * 2


def torch_saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_state_dicts_are_saved_and_read() -> None:
    dense = Net()

    def on_rank(mesh: Any) -> None:
        module, other = distributed(dense, mesh), distributed(dense, mesh)
        with torch.no_grad():
            for each in module.parameters():
                each.add_(1)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
        full = {name: each.full_tensor() for name, each in module.state_dict().items()}
        assert_as(other, _loaded(dense, full))

    on_ranks(on_rank)


def test_hooks_of_every_kind_are_kept_and_see_global_tensors() -> None:
    dense = Net()

    def hook(module: nn.Module, seen: list[Any]) -> None:
        layer: Any = module.get_submodule("first")
        layer.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
        layer.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape)))
        layer.register_full_backward_pre_hook(lambda _, grads: seen.append(norm(grads[0])))
        layer.register_full_backward_hook(lambda _, ins, outs: seen.append(norm(outs[0])))
        module._register_state_dict_hook(lambda *_: seen.append("state"))
        module.register_load_state_dict_post_hook(lambda *_: seen.append("load"))

    def norm(grad: Tensor) -> float:
        return round(grad.norm().item(), 4)

    def steps(module: nn.Module) -> None:
        x = X.clone().requires_grad_()
        module(x).square().sum().backward()
        module.load_state_dict(module.state_dict())

    expected: list[Any] = []
    hook(dense, expected)
    plain = copy.deepcopy(dense)

    def on_rank(mesh: Any) -> list[Any]:
        module, seen = Net(), list[Any]()
        hook(module, seen)
        weft.distribute_module(module, mesh, shardings=SHARDINGS)
        steps(module)
        return seen

    steps(plain)
    for seen in on_ranks(on_rank):
        assert seen == expected


@pytest.mark.parametrize("shardings", [SHARDINGS, EMPTY], ids=["uneven", "empty"])
def test_gradients_are_clipped_by_their_global_norm(shardings: dict[str, Any]) -> None:
    dense = Net()
    dense(X).square().sum().backward()
    total = nn.utils.clip_grad_norm_(dense.parameters(), 0.5)

    def on_rank(mesh: Any) -> Any:
        module = distributed(Net(), mesh, shardings)
        module(weft.distribute_tensor(X, mesh, P("dp"))).square().sum().backward()
        found = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        return found.item(), {
            name: held(each.grad) for name, each in module.named_parameters()
            if each.grad is not None}

    ranks = on_ranks(on_rank)
    for value, _ in ranks:
        assert value == pytest.approx(total.item(), rel=1e-5)
    for name, each in dense.named_parameters():
        if each.grad is not None:
            check(each.grad, [grads[name] for _, grads in ranks], name)
    assert len(ranks[0][1]) == 4


def test_vectors_of_parameters_keep_the_layouts() -> None:
    dense = Net()
    vector = nn.utils.parameters_to_vector(dense.parameters())

    def on_rank(mesh: Any) -> None:
        module, plain = distributed(dense, mesh), copy.deepcopy(dense)
        before = layouts(module)
        found = nn.utils.parameters_to_vector(module.parameters())
        torch.testing.assert_close(found.detach().full_tensor(), vector.detach())
        nn.utils.vector_to_parameters(vector * 2, plain.parameters())
        for given in (found * 2, vector * 2):
            with torch.no_grad():
                for each in module.parameters():
                    each.zero_()
            nn.utils.vector_to_parameters(given, module.parameters())
            assert_as(module, plain)
            assert layouts(module) == before
        other = copy.deepcopy(dense)
        nn.utils.vector_to_parameters(found * 2, other.parameters())
        assert all(map(torch.equal, other.parameters(), plain.parameters()))

    on_ranks(on_rank)


@pytest.mark.parametrize("add", [
    lambda module: parametrize.register_parametrization(module.first, "weight", Doubled()),
    lambda module: parametrizations.spectral_norm(module.first),
    lambda module: prune.l1_unstructured(module.first, "weight", 0.3),
], ids=["own", "spectral_norm", "prune"])
@pytest.mark.parametrize("before", [False, True])
def test_parametrizations_before_and_after(add: Callable[[Any], Any], before: bool) -> None:
    def on_rank(mesh: Any) -> Any:
        module: Any = Net()
        if before:
            add(module)
        weft.distribute_module(module, mesh, shardings=SHARDINGS)
        if not before:
            add(module)
        module.eval()
        out = module(X)
        out.square().sum().backward()
        norms = {name: held(each.grad) for name, each in module.named_parameters()
                 if each.grad is not None}
        return held(out.detach()), norms, {
            name: each.full_tensor() for name, each in module.state_dict().items()}

    ranks = on_ranks(on_rank)
    plain = Net()
    add(plain)
    plain.load_state_dict(ranks[0][2])  # vectors of spectral_norm are drawn
    plain.eval()
    out = plain(X)
    out.square().sum().backward()
    check(out.detach(), [each for each, _, _ in ranks])
    for name, each in plain.named_parameters():
        if each.grad is not None:
            check(each.grad, [norms[name] for _, norms, _ in ranks], name)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_functional_call_with_tensors_of_every_kind() -> None:
    dense = Net()
    state = {name: each.detach() * 2 for name, each in dense.state_dict().items()
             if name != "again.weight"}  # a tied weight is given once
    expected = torch.func.functional_call(dense, state, (X,))
    other = Net()
    gradients = torch.func.grad(
        lambda p: torch.func.functional_call(other, p, (X,)).sum())(state)

    def on_rank(mesh: Any) -> None:
        module = distributed(dense, mesh)
        before = list(module.parameters())
        cut: dict[str, Any] = {name: weft.distribute_tensor(each, mesh, P("tp")).requires_grad_()
               for name, each in state.items()}
        whole: dict[str, Any] = {name: each.redistribute(mesh, P()) for name, each in cut.items()}
        kinds: list[dict[str, Any]] = [state, cut, whole]
        for given in kinds:
            out = torch.func.functional_call(module, given, (X,))
            torch.testing.assert_close(out.detach().full_tensor(), expected.detach())
        torch.func.functional_call(module, cut, (X,)).sum().backward()
        assert cut["first.weight"].grad.spec == P("tp") and module.first.weight.grad is None
        # (Of a shared module torch's functional_call leaves a copy behind, of plain ones as well.)
        assert all(one is two for one, two in zip(module.parameters(), before[:4]))
        detached = {name: each.detach() for name, each in cut.items()}
        found = torch.func.grad(
            lambda p: torch.func.functional_call(module, p, (X,)).sum())(detached)
        for name, each in found.items():
            torch.testing.assert_close(each.full_tensor(), gradients[name])

    on_ranks(on_rank)


@pytest.mark.parametrize("spec", [P("dp"), P(None, "tp"), P("tp", "dp"), P(partial={"dp": "sum"})])
def test_a_plain_module_that_is_fed_a_shard_tensor(spec: P) -> None:
    """Nothing is called: plain parameters count as replicated, their gradients are whole."""
    dense = Net()
    plain = copy.deepcopy(dense)
    out = plain(X)
    out.square().sum().backward()

    def on_rank(mesh: Any) -> Any:
        module = copy.deepcopy(dense)
        found = module(weft.distribute_tensor(X, mesh, spec))
        found.square().sum().backward()
        assert all(type(each.grad) in (Tensor, type(None)) for each in module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.step()
        return held(found.detach()), {
            name: None if each.grad is None else each.grad.clone()
            for name, each in module.named_parameters()
        }, [each.detach().clone() for each in module.parameters()]

    ranks = on_ranks(on_rank)
    check(out.detach(), [each for each, *_ in ranks])
    for _, grads, parameters in ranks:
        for name, each in plain.named_parameters():
            torch.testing.assert_close(grads[name], each.grad, msg=name)
        assert all(map(torch.equal, parameters, ranks[0][2]))  # replicas stay equal to the bit


@ranks(**MESH)
def test_a_plain_lazy_module_takes_its_shapes_from_the_global_ones(mesh: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)).eval()
    x = weft.distribute_tensor(X, mesh, P("dp", "tp"))
    out = module(x)
    layer: Any = module[0]
    assert type(layer) is nn.Linear and layer.weight.shape == (3, 6)
    torch.testing.assert_close(out.detach().full_tensor(), module(X).detach())
    weft.distribute_module(module, mesh, shardings={"0.weight": P("tp")})
    torch.testing.assert_close(module(x).full_tensor(), out.full_tensor())


def test_a_shard_tensor_is_no_data_of_a_plain_parameter() -> None:
    def on_rank(mesh: Any) -> str:
        module = nn.Linear(4, 4)
        shard = weft.distribute_tensor(module.weight.detach(), mesh, P("tp"))
        with pytest.raises(ModuleError) as caught:
            module.weight.data = shard
        module.weight.data = module.weight.data * 2
        del shard
        sharded = nn.Parameter(weft.zeros(4, 4, mesh=mesh, spec=P("tp")))
        sharded.data = weft.ones(4, 4, mesh=mesh)
        assert sharded.sum().item() == 16
        lazy = nn.LazyLinear(3)
        lazy(torch.ones(1, 2))
        assert lazy.weight.data.shape == (3, 2)
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
parameter.data = x: x is a ShardTensor [4@tp, 4], the parameter a plain tensor of shape (4, 4).
  Rule: a plain parameter's data is memory of one device.
  Offenders: [4@tp, 4]
  Fix: module.weight = nn.Parameter(x), or weft.distribute_module(module, mesh, \
shardings={"weight": ...})"""


def test_a_module_of_another_class_of_containers() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.list = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.map = nn.ModuleDict({"a": nn.Sequential(nn.Linear(6, 3), nn.ReLU())})
            self.weights = nn.ParameterList([torch.ones(3), torch.full((3,), 2.0)])
            self.named = nn.ParameterDict({"w": torch.ones(3, 2)})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.list:
                x = layer(x)
            x = self.map["a"](x)
            for weight in self.weights:
                x = x * weight
            return x @ self.named["w"]

    dense = Pair()

    def on_rank(mesh: Any) -> Any:
        module = distributed(dense, mesh, {
            "list.0.*": P("tp"), "map.a.0.weight": P(None, "tp"), "weights.*": P("dp"),
            "named.w": P("tp")})
        assert [str(each.sharding) for each in module.weights] == ["[3@dp]", "[3@dp]"]
        assert str(module.named["w"].sharding) == "[3@tp, 2]"
        assert_as(module, dense)
        out = module(X)
        out.square().sum().backward()
        return held(out.detach()), [held(each.grad) for each in module.parameters()]

    out = dense(X)
    out.square().sum().backward()
    ranks = on_ranks(on_rank)
    check(out.detach(), [each for each, _ in ranks])
    for place, each in enumerate(dense.parameters()):
        assert each.grad is not None
        check(each.grad, [grads[place] for _, grads in ranks], str(place))


def test_gradients_of_plain_parameters_by_every_way() -> None:
    """Accumulated, asked for by `torch.autograd.grad`, and of a graph that is differentiated."""
    dense = Net()

    def ways(module: nn.Module, x: Tensor) -> list[Tensor]:
        wanted = [each for each in module.parameters() if each.requires_grad]
        asked = torch.autograd.grad(module(x).square().sum(), wanted, create_graph=True)
        sum(each.square().sum() for each in asked).backward()  # type: ignore[union-attr]
        module(x).square().sum().backward()
        return [*(each.detach() for each in asked), *(each.grad for each in wanted)]  # type: ignore

    def on_rank(mesh: Any) -> list[Tensor]:
        found = ways(copy.deepcopy(dense), weft.distribute_tensor(X, mesh, P("dp", "tp")))
        return [each.full_tensor() if type(each) is ShardTensor else each for each in found]

    expected = ways(copy.deepcopy(dense), X)
    for found in on_ranks(on_rank):
        assert len(found) == len(expected) == 8
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other)
