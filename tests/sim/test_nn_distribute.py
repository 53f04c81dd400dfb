"""distribute_module: which tensor gets which layout, and that the module stays itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import parallel as torch_styles

import weft
from tests.harness import held, ranks
from tests.oracle import check
from weft import Layout, P, Replicate, Shard, ShardTensor
from weft.errors import LayoutError, MeshError, ModuleError

MESH = {"dp": 2, "tp": 2}


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def sharded(tensor: torch.Tensor) -> ShardTensor:
    assert isinstance(tensor, ShardTensor)
    return tensor


def on_ranks(fn: Callable[[Any], Any]) -> list[Any]:
    return weft.testing.run(fn, 4, MESH)


class Tied(nn.Module):
    """An embedding that is its own head, a frozen weight, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.token.weight
        self.head.bias.requires_grad_(False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.arange(5.0))
        self.norm.register_buffer("scale", self.scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.token(tokens) * self.scale)


def test_values_and_gradients_are_those_of_the_full_module() -> None:
    dense, tokens = Tied(), torch.tensor([3, 0, 6])

    def on_rank(mesh):
        module = weft.distribute_module(
            copy.deepcopy(dense), mesh,
            shardings={"token.*": P("tp"), "head.bias": [Replicate(), Shard(0, sizes=(6, 1))]},
        )
        out = module(weft.distribute_tensor(tokens, mesh, P("dp")))
        out.square().sum().backward()
        return held(out.detach()), held(gradient_of(module.token.weight))

    out = dense(tokens)
    out.square().sum().backward()
    ranks = on_ranks(on_rank)
    check(out.detach(), [each for each, _ in ranks])
    check(gradient_of(dense.token.weight), [each for _, each in ranks], "gradient")


def test_the_first_pattern_that_matches_a_name_counts() -> None:
    def on_rank(mesh):
        dense = Tied()
        shapes = {name: each.shape for name, each in dense.state_dict().items()}
        module = weft.distribute_module(dense, mesh, shardings={
            "head.weight": P(None, "tp"),  # another name of token.weight
            "norm.num*": P(), "*.bias": P("dp"), "norm.*": P("tp"),
        })
        assert module is dense
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert all(type(each) is ShardTensor for each in state.values())
        assert {name: each.shape for name, each in module.state_dict().items()} == shapes
        assert module.head.weight is module.token.weight
        assert module.scale is module.norm.scale
        assert not module.head.bias.requires_grad and module.norm.bias.requires_grad
        assert all(isinstance(each, nn.Parameter) for each in module.parameters())
        return {name: each.spec for name, each in state.items()}

    assert on_ranks(on_rank)[3] == {
        "token.weight": P(None, "tp"), "head.bias": P("dp"), "norm.bias": P("dp"),
        "norm.weight": P("tp"), "norm.running_mean": P("tp"), "norm.running_var": P("tp"),
        "norm.num_batches_tracked": P(), "scale": P("tp"),
    }


def test_without_shardings_all_is_replicated_with_the_first_ranks_values() -> None:
    def on_rank(mesh):
        module = nn.Linear(3, 2)
        nn.init.constant_(module.weight, mesh.rank)
        with mesh:
            weft.distribute_module(module)
        assert sharded(module.bias).sharding.is_replicated
        assert sharded(module.weight).sharding.is_replicated
        return sharded(module.weight).to_local().unique().tolist()

    assert on_ranks(on_rank) == [[0.0]] * 4


def test_functions_of_the_user_are_called_as_by_dtensor() -> None:
    def on_rank(mesh):
        calls = []

        def partition(name, module, on):
            calls.append((name, type(module).__name__, on is mesh))
            if name == "0":
                module.weight = nn.Parameter(weft.distribute_tensor(module.weight, mesh, P("dp")))

        def to_shards(module, inputs, on):
            return tuple(weft.distribute_tensor(each, on, P("dp")) for each in inputs)

        module = weft.distribute_module(
            nn.Sequential(nn.Linear(3, 4), nn.ReLU()), mesh, partition, to_shards,
            lambda module, out, on: out.redistribute(on, [Replicate()] * 2).to_local(),
        )
        weight, bias = module[0].parameters()
        assert (sharded(weight).spec, sharded(bias).spec) == (P("dp"), P())
        out = module(torch.ones(5, 3))
        assert type(out) is torch.Tensor and out.shape == (5, 4)
        return calls

    assert on_ranks(on_rank)[0] == [
        ("", "Sequential", True), ("0", "Linear", True), ("1", "ReLU", True),
    ]


@ranks(**MESH)
def test_what_is_distributed_already_stays_or_has_to_agree(mesh: Any) -> None:
    part = weft.distribute_module(nn.Linear(3, 4), mesh, shardings={"weight": P("dp")})
    weight = part.weight
    module = nn.Sequential(part, nn.Linear(4, 2))
    with pytest.raises(LayoutError, match="distributed as") as caught:
        weft.distribute_module(module, mesh, shardings={"0.weight": P("tp"), "1.*": P("dp")})
    assert caught.value.__notes__ == ["  in distribute_module, for 0.weight"]
    assert type(module[1].weight) is nn.Parameter
    weft.distribute_module(module, mesh, shardings={"1.*": P("dp")})
    assert module[0].weight is weight
    assert weight.sharding == Layout(mesh, (4, 3), P("dp"))


def test_a_module_is_distributed_once() -> None:
    def on_rank(mesh):
        module = weft.distribute_module(nn.Linear(3, 4), mesh)
        with pytest.raises(RuntimeError) as caught:  # which torch raises
            weft.distribute_module(module, mesh)
        assert isinstance(caught.value, ModuleError)
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
distribute_module(module): this Linear has been distributed already.
  Rule: a module is distributed once; its hooks would be registered again.
  Offenders: Linear
  Fix: parameter.data = parameter.redistribute(placements=...) for another layout; \
distribute_module(module.new_part, mesh) for a part that was added
       two kinds of parallelism are one table, whose entries name both axes: \
shardings={"0": weft.nn.ColwiseParallel(("tp", "dp")), "*": P("dp")}"""


@pytest.mark.parametrize("name", ["input_fn", "output_fn"])
def test_functions_of_two_arguments_are_deprecated_and_others_refused(name: str) -> None:
    def on_rank(mesh):
        def halve(values, on):
            assert on is mesh
            return tuple(one / 2 for one in values) if name == "input_fn" else values / 2

        module = nn.Linear(3, 4, bias=False)
        x = torch.ones(5, 3)
        expected = module(x) / 2
        # (pytest.warns is of the process, and ranks take turns)
        hook: Any = {name: halve}
        weft.distribute_module(module, mesh, None, **hook)
        torch.testing.assert_close(module(x).full_tensor(), expected)
        with pytest.raises(ValueError, match="takes 1 arguments, not 3") as caught:
            hook = {name: lambda x: x}
            weft.distribute_module(nn.Linear(3, 4), mesh, **hook)
        assert isinstance(caught.value, ModuleError)

    with pytest.warns(FutureWarning, match=f"{name} of two arguments"):
        on_ranks(on_rank)


def test_weights_that_a_partition_function_lays_out_apart_are_tied_again() -> None:
    def on_rank(mesh):
        def partition(name, module, on):
            if "weight" in module._parameters and name in only:
                weight = weft.distribute_tensor(module.weight.detach(), on, specs[name])
                module.register_parameter("weight", nn.Parameter(weight))

        only, specs = ["head"], {"head": P("tp"), "token": P("tp")}
        module = weft.distribute_module(Tied(), mesh, partition)
        assert module.token.weight is module.head.weight
        assert sharded(module.head.weight).spec == P("tp")
        only.append("token")
        module = weft.distribute_module(Tied(), mesh, partition)
        assert module.token.weight is module.head.weight
        specs["token"] = P(None, "tp")
        with pytest.raises(ModuleError) as caught:
            weft.distribute_module(Tied(), mesh, partition)
        return str(caught.value)

    assert on_ranks(on_rank)[1] == """\
distribute_module(partition_fn): one tensor with 2 names (tied weights) became several, in \
different layouts.
  Rule: tied weights are one tensor, which has one layout.
  Offenders: token.weight: [7, 5@tp], head.weight: [7@tp, 5]
  Fix: if isinstance(module.weight, weft.ShardTensor): return"""


def test_tied_weights_that_are_given_two_specs() -> None:
    def on_rank(mesh):
        module = Tied()
        with pytest.raises(LayoutError) as caught:
            weft.distribute_module(
                module, mesh, shardings={"token.*": P("tp"), "*.weight": P(None, "tp")})
        assert type(module.token.weight) is nn.Parameter
        weft.distribute_module(module, mesh, shardings={"token.*": P("tp"), "head.*": P("tp")})
        assert module.token.weight is module.head.weight
        return str(caught.value)

    assert on_ranks(on_rank)[3] == """\
distribute_module(shardings=): one tensor has 2 names (tied weights), which are given 2 layouts.
  Rule: tied weights are one tensor, which has one layout.
  Offenders: token.weight: [7@tp, 5] by 'token.*', head.weight: [7, 5@tp] by '*.weight'
  Fix: the same spec for token.weight and head.weight, or a pattern for one of them alone"""


def test_all_specs_that_do_not_fit_are_told() -> None:
    def on_rank(mesh):
        with pytest.raises(weft.WeftError) as caught:
            weft.distribute_module(nn.Linear(3, 4), mesh, shardings={
                "weight": P(None, None, "dp"), "bias": P("pp")})
        return caught.value.__notes__

    first, second = on_ranks(on_rank)[0][:2]
    assert first == "  in distribute_module, for weight"
    assert second.startswith("  and for bias: ") and "'pp'" in second


@ranks(**MESH)
def test_gradients_hooks_and_attributes_of_parameters_come_along(mesh: Any) -> None:
    module = nn.Linear(3, 4)
    module.weight.grad = torch.arange(12.0).view(4, 3)
    module.weight.no_decay = True
    seen = []
    module.weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    module.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.sum()))
    weft.distribute_module(module, mesh, shardings={"weight": P("dp")})
    assert module.weight.grad.spec == P("dp") and module.weight.no_decay
    module(torch.ones(2, 3)).sum().backward()
    assert torch.equal(
        module.weight.grad.full_tensor(), torch.arange(12.0).view(4, 3) + 2)
    assert [type(one) for one in seen].count(tuple) == 1 and len(seen) == 2


class Keeps(nn.Module):
    """A module that keeps its parameters in other places, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))
        self.all, self.both, self.named = [self.a, self.b], (self.a, 1), {"b": self.b}
        self.rnn = nn.LSTM(4, 3)

    def forward(self, x):
        a, b = self.all
        return self.rnn(x @ a.mT + self.named["b"] + b)[0] @ self.both[0].mT


def test_references_in_lists_and_maps_are_replaced() -> None:
    dense = Keeps()
    x = torch.arange(6.0).view(2, 3)
    dense(x).sum().backward()

    def on_rank(mesh):
        module = weft.distribute_module(
            copy.deepcopy(dense).requires_grad_(), mesh, shardings={"a": P("dp"), "b": P("tp")})
        module.zero_grad()
        assert module.all == [module.a, module.b] and module.named == {"b": module.b}
        assert module.both[0] is module.a
        module(x).sum().backward()
        return {name: held(gradient_of(each)) for name, each in module.named_parameters()}

    ranks = on_ranks(on_rank)
    for name, each in dense.named_parameters():
        check(gradient_of(each), [grads[name] for grads in ranks], name)


def test_a_sparse_buffer_is_refused() -> None:
    def on_rank(mesh):
        module = nn.Linear(3, 4)
        module.register_buffer("graph", torch.eye(4).to_sparse())
        with pytest.raises(ModuleError) as caught:
            weft.distribute_module(module, mesh)
        assert type(module.weight) is nn.Parameter
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
distribute_module(module): 1 of 3 parameters and buffers are sparse.
  Rule: a ShardTensor's blocks are dense.
  Offenders: graph: torch.sparse_coo
  Fix: module.graph = module.graph.to_dense()"""


def test_arguments_of_other_kinds() -> None:
    def on_rank(mesh):
        texts = []
        wrong: list[dict[str, Any]] = [
            {"shardings": [P("dp")]}, {"activations": {0: P("dp")}}, {"activations": {"": "dp"}},
            {"activations": {"": weft.nn.ColwiseParallel("tp")}}, {"activations": {"": P("pp")}},
            {"shardings": {"": weft.nn.RowwiseParallel}}, {"shardings": {"": "colwise"}},
            {"shardings": {"": torch_styles.SequenceParallel()}}, {"shardings": {"": P("dp")}},
        ]
        for arguments in wrong:
            module = nn.Linear(3, 4)
            with pytest.raises(weft.WeftError) as caught:
                weft.distribute_module(module, mesh, **arguments)
            assert type(module.weight) is nn.Parameter
            texts.append(f"{type(caught.value).__name__}: {caught.value}".splitlines()[0])
        weft.distribute_module(nn.Linear(3, 4), mesh, shardings={"bias": None})  # replicated
        return texts

    assert on_ranks(on_rank)[0] == [
        "ShardTypeError: distribute_module(shardings=): [P('dp')] is of type list.",
        "ShardTypeError: distribute_module(activations=): {0: P('dp')} is of type dict.",
        "ShardTypeError: distribute_module(activations=): 'dp' is of type str.",
        "ModuleError: distribute_module(activations=): ColwiseParallel('tp') shards parameters, "
        "not activations.",
        "MeshError: activations['']: 'pp' is no axis of Mesh(dp=2, tp=2).",
        *3 * ["ShardTypeError: distribute_module(shardings=): 1 of 1 patterns are given what is no "
              "style of weft.nn but named as one."],
        "LayoutError: distribute_module(shardings=): 1 patterns match modules, and no parameter or "
        "buffer.",
    ]


def test_the_fix_of_a_spec_for_a_module_names_its_parameter() -> None:
    def on_rank(mesh):
        module = nn.ModuleDict({"up": nn.Linear(4, 6), "norm": nn.LayerNorm(4)})
        with pytest.raises(weft.WeftError) as caught:
            weft.distribute_module(module, mesh, shardings={"u?": P("tp"), "norm": P()})
        with pytest.raises(weft.WeftError) as other:
            weft.distribute_module(module, mesh, shardings={"up": "rowwise"})
        return [str(one.value).splitlines()[-1] for one in (caught, other)]

    assert on_ranks(on_rank)[0] == [
        "  Fix: shardings={'u?.weight': P('tp'), 'norm.weight': P()}",
        "  Fix: shardings={'up': weft.nn.RowwiseParallel(\"tp\")}",
    ]


def test_what_is_no_module_and_no_function() -> None:
    def on_rank(mesh):
        with pytest.raises(weft.ShardTypeError) as caught:
            weft.distribute_module(torch.ones(3), mesh, input_fn=3)  # type: ignore[type-var]
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
distribute_module(module): 2 of 4 arguments are of other types.
  Rule: a torch.nn.Module is distributed; partition_fn, input_fn and output_fn are functions.
  Offenders: module: Tensor, input_fn: int
  Fix: distribute_tensor(tensor, mesh, P(...)), where a tensor is meant"""


def test_an_optimizer_built_before_distribution() -> None:
    def on_rank(mesh):
        module = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(ModuleError) as caught:
            weft.distribute_module(module, mesh)
        assert type(module.weight) is nn.Parameter
        del optimizer
        weft.distribute_module(module, mesh)  # dropped optimizers do no harm
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        return str(caught.value)

    assert on_ranks(on_rank)[2] == """\
distribute_module(module): an optimizer (SGD) holds 2 of the module's parameters as they were \
before distribution.
  Rule: an optimizer is built of the parameters that distribution has put there.
  Offenders: weight, bias
  Fix: distribute_module(module, mesh, ...)
       optimizer = torch.optim.SGD(module.parameters(), ...)"""


@ranks(**MESH)
def test_an_optimizer_that_nobody_saw_being_built_is_refused_at_its_step(mesh: Any) -> None:
    module = nn.Linear(3, 4)
    before = list(module.parameters())
    weft.distribute_module(module, mesh)
    optimizer = torch.optim.AdamW(before, lr=0.1)
    with pytest.raises(ModuleError, match=r"AdamW.step\(\): an optimizer .* holds 2 of"):
        optimizer.step()
    torch.optim.AdamW(nn.Linear(2, 2).parameters()).step()  # others are not looked at


def test_a_lazy_module_is_refused_until_it_has_shapes() -> None:
    def on_rank(mesh):
        module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        with pytest.raises(ModuleError) as caught:
            weft.distribute_module(module, mesh, shardings={"0.*": P("tp")})
        module(torch.ones(1, 3))
        weft.distribute_module(module, mesh, shardings={"0.*": P("tp")})
        assert module[0].weight.spec == P("tp")
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
distribute_module(module): 2 of 4 parameters and buffers have no shape yet.
  Rule: a layout needs a known shape.
  Offenders: 0.weight, 0.bias
  Fix: module(batch)  # one forward on plain tensors, before it is distributed"""


def test_a_pattern_that_matches_nothing_is_named() -> None:
    def on_rank(mesh):
        module = nn.Linear(3, 4)
        with pytest.raises(LayoutError) as caught:
            weft.distribute_module(
                module, mesh, shardings={"weight": P("dp"), "wieght": P("dp"), "x.*": P()}
            )
        assert type(module.weight) is nn.Parameter
        return str(caught.value)

    assert on_ranks(on_rank)[0] == """\
distribute_module(shardings=): 2 of 3 patterns match none of the 2 names of parameters and \
buffers: weight, bias.
  Rule: every pattern matches at least one name.
  Offenders: 'wieght' (near 'weight'), 'x.*'
  Fix: print([name for name, _ in module.named_parameters()])"""


@ranks(**MESH)
def test_a_spec_that_does_not_fit_names_its_parameter_before_anything_is_replaced(
    mesh: Any
) -> None:
    module = nn.Linear(3, 4)
    with pytest.raises(MeshError) as caught:
        weft.distribute_module(module, mesh, shardings={"bias": P("pp")})
    assert caught.value.__notes__ == ["  in distribute_module, for bias"]
    assert type(module.weight) is nn.Parameter


def test_a_star_means_all_parameters() -> None:
    """No group gathers buffers; those that are named are sharded, and those of a module that has
    nothing else. A batch norm's statistics are those of one process."""
    x = torch.randn(6, 4, dtype=torch.float64)
    plain: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()
    due: Any = copy.deepcopy(plain)
    due(x).square().sum().backward()

    def on_rank(mesh: Any) -> tuple[Any, ...]:
        made: Any = weft.distribute_module(copy.deepcopy(plain), mesh, shardings={
            "*.running_var": P("dp"), "*": P("dp")})
        made(weft.distribute_tensor(x, mesh, P("dp"))).square().sum().backward()
        torch.testing.assert_close(made[0].weight.grad.full_tensor(), due[0].weight.grad)
        norm = nn.BatchNorm1d(4, affine=False)
        alone: Any = weft.distribute_module(norm, mesh, shardings={"*": P("dp")})
        return (*[(one.full_tensor(), one.spec) for one in (
            made[1].weight, made[1].running_mean, made[1].running_var)], alone.running_mean.spec)

    for weight, mean, var, alone in weft.testing.run(on_rank, mesh={"dp": 3}):
        assert (weight[1], mean[1], var[1], alone) == (P("dp"), P(), P("dp"), P("dp"))
        torch.testing.assert_close(mean[0], due[1].running_mean)
        torch.testing.assert_close(var[0], due[1].running_var)


@ranks(dp=3)
def test_a_wildcard_replicates_what_has_no_dims(mesh: Any) -> None:
    norm = weft.distribute_module(nn.BatchNorm1d(6), mesh, shardings={"?*": P("dp")})
    assert norm.weight.sharding.dims == ((0,),)
    assert norm.num_batches_tracked.sharding.dims == ()
    with pytest.raises(weft.PlacementError, match="1 entries"):
        weft.distribute_module(nn.BatchNorm1d(6), mesh, shardings={"num_batches_tracked": P("dp")})
