"""What users do with modules whose parameters are gathered, found by drawn programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import weft
from tests.fuzz.layers import Cube
from tests.harness import ranks
from weft import P

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()


class Layer(nn.Module):
    """A Function of the user's is the last that reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Any) -> Any:
        return Cube.apply(self.lin(x).tanh(), self.scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.shift = nn.Parameter(torch.randn(4), requires_grad=False)
        self.runs: Callable[[Any, Any], Any] = lambda layer, x: layer(x)
        self.double()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + self.runs(layer, x)
        return x + self.shift


def a_function_of_the_users(model: Any, x: Any) -> None:
    model(x).square().mean().backward()


def inference_comes_first(model: Any, x: Any) -> None:
    with torch.inference_mode():
        model(x)
    model(x).square().mean().backward()


def written_in_place(model: Any, x: Any) -> None:
    """What a layer gives of more dims than two is a view of a product."""
    for layer in model.layers:
        layer.lin.register_forward_hook(lambda _, __, out: out.mul_(0.5))
    out = model.layers[0].lin(x[:, None])
    (out.square().mean() + model(x[:, None]).square().mean()).backward()


def checkpoints_are_selective(model: Any, x: Any) -> None:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    model.runs = lambda layer, x: checkpoint(
        layer, x, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy))
    model(x.requires_grad_()).square().mean().backward()


def hooks_are_called_in_each_backward(model: Any, x: Any) -> None:
    def halve(one: Any) -> None:
        one.grad.mul_(0.5)

    for one in model.layers.parameters():
        one.register_post_accumulate_grad_hook(halve)
    with weft.nn.accumulate(model):
        for part in (x, x * 2):
            model(part).square().mean().backward()


def hooks_see_the_whole_gradient(model: Any, x: Any) -> None:
    """A parameter is gathered in forwards, and also stands in a step that the second one takes."""
    def halve(one: Any) -> None:
        one.grad.mul_(0.5)

    weights = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for one in weights.values():
        one.register_post_accumulate_grad_hook(halve)
    slopes = torch.autograd.grad(
        model(x).square().mean(), list(weights.values()), create_graph=True)
    stepped = {name: one - slope for (name, one), slope in zip(weights.items(), slopes)}
    torch.func.functional_call(model, stepped, (x,)).square().mean().backward()


def other_weights_before_a_recomputation(model: Any, x: Any) -> None:
    model.runs = lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    weights = dict(model.named_parameters())
    loss = model(x.requires_grad_()).square().mean()
    others = {name: one * 2 for name, one in weights.items()}
    loss = loss + torch.func.functional_call(model, others, (x,)).square().mean()
    loss.backward()


def _whole(x: Any) -> Any:
    """A batch of its own, that no axis shards."""
    whole = x.detach()
    return whole.redistribute(placements=P()) if isinstance(x, weft.ShardTensor) else whole


def whole_batches_follow_sharded_ones(model: Any, x: Any) -> None:
    """What was not gathered in forward is not gathered to compute it again."""
    model.runs = lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    model(x.requires_grad_()).square().mean().backward()
    model(_whole(x).requires_grad_()).square().mean().backward()


def layers_thaw_before_a_whole_batch(model: Any, x: Any) -> None:
    """Of a reentrant checkpoint, too. The group of the batch before had a frozen layer."""
    model.runs = lambda layer, x: checkpoint(layer, x, use_reentrant=True)
    model.layers[1].requires_grad_(False)
    model(x.requires_grad_()).square().mean().backward()
    model.layers[1].requires_grad_(True)
    model(_whole(x).requires_grad_()).square().mean().backward()


def layers_thaw_between_forward_and_backward(model: Any, x: Any) -> None:
    """A reentrant checkpoint finds them thawed."""
    model.runs = lambda layer, x: checkpoint(layer, x, use_reentrant=True)
    model.layers[1].requires_grad_(False)
    loss = model(x.requires_grad_()).square().mean()
    model.layers[1].requires_grad_(True)
    loss.backward()


def data_are_set(model: Any, x: Any) -> None:
    """On a rank without a shard nothing has an address that would tell."""
    for _ in range(2):
        model(x).square().mean().backward()
        model.float()
        model.double()


def a_part_of_two_groups_has_hooks(model: Any, x: Any) -> None:
    def halve_but(one: Any) -> None:
        one.grad.mul_(0.5).clamp_(max=0.1)

    model.layers[1].lin = model.layers[0].lin
    for one in model.layers.parameters():
        one.register_post_accumulate_grad_hook(halve_but)
    model(x).square().mean().backward()


def a_forward_between_a_derivative_and_its_own(model: Any, x: Any) -> None:
    """What the graph of the derivative reads of a frozen layer is still there."""
    model.layers[0].requires_grad_(False)
    wanted = [*model.layers[1].parameters()]
    slopes = torch.autograd.grad(
        model(x.requires_grad_()).square().mean(), [x, *wanted], create_graph=True)
    again = model(x).square().mean()
    (again + sum(slope.square().sum() for slope in slopes)).backward()
    model.layers[0].requires_grad_(True)
    model(x.detach()).square().mean().backward()


def values_are_set_in_a_forward(model: Any, x: Any) -> None:
    """From data, before they are used and after, as layers that initialize themselves do."""
    def set_scale(layer: Any, out: Any) -> None:
        layer.scale.data = out.detach().std(0)
        layer.lin.bias.data.mul_(0.5)

    for layer in model.layers:
        layer.lin.register_forward_hook(lambda _, __, out, layer=layer: set_scale(layer, out))
    for _ in range(2):
        model(x).square().mean().backward()


class Again(torch.autograd.Function):
    """A module whose backward runs its forward, as solvers by adjoints and reversible layers do."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Any, *weights: Any) -> Any:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.module(x), (x, *weights), grad)


class Reversed(torch.autograd.Function):
    """As `Again`, of a list of layers, whose backward leaves the gradients of their weights."""

    @staticmethod
    def forward(ctx: Any, x: Any, layers: Any) -> Any:
        ctx.layers, ctx.x = layers, x.detach()
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with torch.enable_grad():
            x = out = ctx.x.requires_grad_()
            for layer in ctx.layers:
                out = layer(out)
        torch.autograd.backward(out, grad)
        return x.grad, None


def functions_of_modules(model: Any, x: Any) -> None:
    used = [one for one in model.parameters() if one.requires_grad]
    x.requires_grad_()
    out = Again.apply(model, Reversed.apply(x, model.layers), *used)
    out.square().mean().backward()
    out = Again.apply(lambda x: model(x).square(), x, *used)  # as a function that closes over it
    (out * model(x)).mean().backward()


def functions_inside_of_a_module(model: Any, x: Any) -> None:
    """They ask for the gradients of parameters that were gathered when they were given them."""
    def forward(layer: Any, x: Any) -> Any:
        return Again.apply(layer.lin, x, *layer.lin.parameters()).tanh() * layer.scale

    for layer in model.layers:
        layer.forward = partial(forward, layer)
    model(x.requires_grad_()).square().mean().backward()


def a_module_calls_itself(model: Any, x: Any) -> None:
    layer = model.layers[1]
    inner = layer.forward

    def forward(x: Any, depth: int = 2) -> Any:
        x = inner(x)
        if depth:
            x = x + checkpoint(layer, x, 0, use_reentrant=False) + layer(x, depth - 1)
        return layer.lin(x)

    layer.forward = forward
    model(x).square().mean().backward()


def a_forward_is_interrupted(model: Any, x: Any) -> None:
    """torch calls no hooks after an exception that is no Exception."""
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for layer in model.layers:
        hook = layer.lin.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        hook.remove()
        model(x).square().mean().backward()


def gradients_are_read_and_set_in_a_forward(model: Any, x: Any) -> None:
    def before(module: Any, given: Any) -> Any:
        weight = module.weight
        factor = 0.5 if weight.grad is None else weight.grad.detach().sum()
        weight.grad = None if module.bias.grad is None else torch.ones_like(weight)
        return given[0] * factor

    for layer in model.layers:
        layer.lin.register_forward_pre_hook(before)
    for _ in range(2):
        model(x).square().mean().backward()


def hooks_are_registered_in_a_forward(model: Any, x: Any) -> None:
    def before(module: Any, _: Any) -> None:
        module.weight.register_hook(lambda grad: grad * 0.5)
        module.bias.register_post_accumulate_grad_hook(shrink)

    def shrink(param: Any) -> None:
        param.grad.mul_(0.5)

    for layer in model.layers:
        layer.lin.register_forward_pre_hook(before)
    model(x).square().mean().backward()


def parameters_thaw_in_a_forward(model: Any, x: Any) -> None:
    model.requires_grad_(False)
    model.layers[0].register_forward_pre_hook(lambda module, _: module.requires_grad_() and None)
    model.layers[1].lin.register_forward_pre_hook(lambda *_: model.requires_grad_() and None)
    for _ in range(2):
        model(x).square().mean().backward()


def weights_are_normalized_in_a_forward(model: Any, x: Any) -> None:
    def before(module: Any, _: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm(dim=1, keepdim=True))

    for layer in model.layers:
        layer.lin.register_forward_pre_hook(before)
    model(x).square().mean().backward()


def a_backward_in_a_forward_follows_a_write(model: Any, x: Any) -> None:
    def forward(x: Any) -> Any:
        with torch.no_grad():
            model.shift.add_(1)
        (x.detach().requires_grad_() * model.shift).mean().backward()
        return Model.forward(model, x)

    model.forward = forward
    model(x).square().mean().backward()


def a_forward_takes_steps_of_its_own(model: Any, x: Any) -> None:
    optimizers = {
        layer: torch.optim.SGD(layer.lin.parameters(), 0.1, momentum=0.9)
        for layer in model.layers}

    def before(layer: Any, given: Any) -> None:
        layer.lin(given[0].detach()).square().mean().backward()
        optimizers[layer].step()
        optimizers[layer].zero_grad()

    for layer in model.layers:
        layer.register_forward_pre_hook(before)
    for _ in range(3):
        out = model(x)
    out.square().mean().backward()


PROGRAMS = [
    a_forward_takes_steps_of_its_own,
    a_backward_in_a_forward_follows_a_write,
    gradients_are_read_and_set_in_a_forward, hooks_are_registered_in_a_forward,
    parameters_thaw_in_a_forward, weights_are_normalized_in_a_forward,
    a_module_calls_itself, a_forward_is_interrupted,
    functions_inside_of_a_module, values_are_set_in_a_forward, functions_of_modules,
    a_function_of_the_users, inference_comes_first, written_in_place, checkpoints_are_selective,
    hooks_are_called_in_each_backward, hooks_see_the_whole_gradient,
    other_weights_before_a_recomputation, whole_batches_follow_sharded_ones, data_are_set,
    layers_thaw_before_a_whole_batch, layers_thaw_between_forward_and_backward,
    a_part_of_two_groups_has_hooks, a_forward_between_a_derivative_and_its_own,
]


@pytest.mark.parametrize("spec", [P("dp"), P()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_gradients_are_those_of_one_process(program: Any, spec: P) -> None:
    plain = Model()
    program(plain, X.clone())

    def on_rank(mesh: Any) -> list[Tensor]:
        model = weft.distribute_module(Model(), mesh, shardings={"*": spec})
        program(model, weft.distribute_tensor(X, mesh, P("dp")))
        return [one.grad.full_tensor() for one in model.layers.parameters()]  # type: ignore

    for found in weft.testing.run(on_rank, mesh={"dp": 3}):  # rank 2 has no shard
        torch.testing.assert_close(found, [one.grad for one in plain.layers.parameters()])


@pytest.mark.parametrize("spec", [P("dp"), P()], ids=["sharded", "replicated"])
def test_a_gradient_penalty_where_a_rank_has_no_rows(spec: P) -> None:
    def gradients(model: Any, x: Any) -> list[Tensor]:
        grad, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.norm(dim=1) - 1).square().mean().backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    def chain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def on_rank(mesh: Any) -> list[Tensor]:
        model = weft.distribute_module(chain(), mesh, shardings={"*": spec})
        x = weft.distribute_tensor(X[:2], mesh, P("dp")).requires_grad_()
        return [one.full_tensor() for one in gradients(model, x)]  # type: ignore[attr-defined]

    due = gradients(chain(), X[:2].clone().requires_grad_())
    for found in weft.testing.run(on_rank, mesh={"dp": 3}):
        torch.testing.assert_close(found, due)


def test_a_checkpoint_of_a_leaf_where_a_rank_has_no_rows() -> None:
    """The gradient of the leaf arrives before that of the weight on ranks with rows only."""
    def gradient(layer: nn.Conv1d, x: Tensor) -> Tensor | None:
        checkpoint(layer, x.requires_grad_(), use_reentrant=False).square().sum().backward()
        return layer.weight.grad

    def conv() -> nn.Conv1d:
        torch.manual_seed(0)
        return nn.Conv1d(2, 3, 2, bias=False).double()

    def on_rank(mesh: Any) -> Tensor:
        layer = weft.distribute_module(conv(), mesh, shardings={"weight": P(None, "dp")})
        lines = weft.distribute_tensor(X.view(6, 2, 2)[:2], mesh, P("dp"))
        return gradient(layer, lines).full_tensor()  # type: ignore[union-attr]

    due = gradient(conv(), X.view(6, 2, 2)[:2])
    for found in weft.testing.run(on_rank, mesh={"dp": 3}):
        torch.testing.assert_close(found, due)


def test_results_of_one_call_end_in_the_order_of_ranks_with_rows() -> None:
    """A cell's output is made of its state. On a rank without rows, too, the gradient of the state
    is complete after that of the output, which a second module reads."""
    def gradients(put: Any, x: Any) -> list[Any]:
        torch.manual_seed(0)
        cell, head = put(nn.LSTMCell(4, 3).double()), put(nn.Linear(3, 4).double())
        state = x.new_zeros(2, 3), x.new_zeros(2, 3)
        for _ in range(2):
            state = cell(x, state)
            x = head(state[0])
        x.square().mean().backward()
        return [one.grad for one in (*cell.parameters(), *head.parameters())]

    def on_rank(mesh: Any) -> list[Tensor]:
        def put(module: nn.Module) -> nn.Module:
            return weft.distribute_module(module, mesh, shardings={"*": P("dp")})

        x = weft.distribute_tensor(X[:2], mesh, P("dp"))
        return [one.full_tensor() for one in gradients(put, x)]

    due = gradients(lambda module: module, X[:2])
    for found in weft.testing.run(on_rank, mesh={"dp": 3}):
        torch.testing.assert_close(found, due)


@ranks(dp=3)
def test_a_hook_on_a_result_behind_another(mesh: Any) -> None:
    """Of the state of a cell, of which the loss reads the output alone: rank 2 has no rows."""
    seen: list[float] = []
    cell = weft.distribute_module(nn.LSTMCell(4, 3).double(), mesh)
    output, state = cell(weft.distribute_tensor(X[:2], mesh, P("dp")))
    state.register_hook(lambda grad: seen.append(grad.sum().item()))
    output.sum().backward()
    assert len(seen) == 1


@ranks(dp=2)
def test_a_weight_written_after_its_use_raises(mesh: Any) -> None:
    model: Any = weft.distribute_module(Model(), mesh, shardings={"*": P("dp")})
    layer = model.layers[1]

    def after(*_: Any) -> None:
        with torch.no_grad():
            layer.lin.weight.mul_(2)

    layer.register_forward_hook(after)
    loss = model(weft.distribute_tensor(X, mesh, P("dp"))).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
