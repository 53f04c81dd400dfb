"""What a ShardTensor says of itself, and conversions: the same as a plain tensor's."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.harness import ranks
from tests.sharded import WAYS, Make, agree
from weft import Layout, LayoutError, P, ShardTensor

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
C = torch.complex(X, X.flip(0))


def facts(make: Make) -> Any:
    x = make(X)
    return [
        tuple(x.shape), x.dtype, x.ndim, x.dim(), x.device, x.requires_grad, x.is_leaf,
        x.grad is None, x.grad_fn is None, tuple(x.size()), x.size(1), x.size(-1), x.stride(),
        x.stride(-1), x.numel(), x.nelement(), len(x), x.nbytes, x.itemsize, x.element_size(),
        x.is_contiguous(), x.t().is_contiguous(), x.is_floating_point(), x.is_complex(), x.is_cuda,
        x.is_sparse, x.output_nr, x._version, x.retains_grad, x.T.stride(), x.type(),
        isinstance(x, torch.Tensor), torch.is_tensor(x), isinstance(x, nn.Parameter),
    ]


def transposes(make: Make) -> Any:
    x = make(X)
    return [x.T, x.mT, x.H, x.mH, x.real, x.T.requires_grad, x.mT.is_leaf]


def complex_parts(make: Make) -> Any:
    x = make(C)
    return [x.real, x.imag, x.conj().imag.clone(), x.abs(), torch.view_as_real(x)]


def requires_grad(make: Make) -> Any:
    x = make(X, False)
    seen = [x.requires_grad]
    x.requires_grad = True
    seen.append(x.requires_grad)
    seen.append(x.requires_grad_(False).requires_grad)
    assert x.requires_grad_() is x
    (x * x).sum().backward()
    return [seen, x.grad]


def requires_grad_of_integers(make: Make) -> Any:
    make(torch.arange(10).view(5, 2)).requires_grad_()


def requires_grad_of_results(make: Make) -> Any:
    (make(X) * 2).requires_grad_(False)


def gradient_assigned(make: Make) -> Any:
    x = make(X)
    x.grad = torch.ones(5, 6, dtype=X.dtype)
    first = x.grad.clone()
    (x * 2).sum().backward()
    second = x.grad.clone()
    del x.grad
    gone = x.grad is None
    x.grad = x.detach() * 3
    assert x.grad is x.grad
    x.grad.mul_(2)
    return [first, second, gone, x.grad]


def gradient_in_place(make: Make) -> Any:
    x = make(X)
    (x * x).sum().backward()
    x.grad.mul_(2)
    x.grad += 1
    x.grad.data.div_(3)
    (x * x).sum().backward()
    kept = x.grad.clone()
    x.grad.zero_()
    return [kept, x.grad]


def gradient_of_results(make: Make) -> Any:
    x = make(X)
    y = x * 2
    y.retain_grad()
    (y * y).sum().backward()
    return [y.grad, x.grad, y.is_leaf, y.grad_fn is not None, y.retains_grad]


def data_of(make: Make) -> Any:
    x = make(X)
    kept = x.data
    kept.zero_()
    zeros = x.detach().clone()
    x.data = make(X + 1, False)
    (x * x).sum().backward()
    gradient = x.grad.clone()
    x.data = torch.zeros(5, 6, dtype=X.dtype)
    seen = [kept.requires_grad, zeros, gradient, x.is_leaf, x.requires_grad, x.data.clone()]
    x.grad = None
    x.data = x.data.float()
    return [*seen, x.dtype, x.data]


def data_of_another_shape(make: Make) -> Any:
    """As a model's table of embeddings grows; what was cut stays cut by the same axes."""
    x = make(X)
    x.data = torch.arange(7.0 * 6, dtype=X.dtype).view(7, 6)
    (x * x).sum().backward()
    seen = [x.is_leaf, x.requires_grad, list(x.shape), x * 1, x.grad.clone()]
    x.grad = None
    x.data = torch.ones(3, dtype=X.dtype)
    (x * 2).sum().backward()
    return [*seen, x.data, x.grad]


def versions(make: Make) -> Any:
    x = make(X, False)
    before = x._version
    x.add_(1)
    x.detach().mul_(2)
    return [before, x._version, x]


def parameters(make: Make) -> Any:
    module = nn.Module()
    module.p = nn.Parameter(make(X, False))
    module.q = nn.Parameter(make(X, False), requires_grad=False)
    module.register_buffer("b", make(X, False))
    p = module.p
    return [
        isinstance(p, nn.Parameter), isinstance(module.b, nn.Parameter), p.requires_grad, p.is_leaf,
        module.q.requires_grad, [name for name, _ in module.named_parameters()],
        [name for name, _ in module.named_buffers()], p.sum(),
    ]


def in_sets_and_dicts(make: Make) -> Any:
    x, y = make(X), make(X)
    names = {x: "x", y: "y"}
    return [len({x, y, x}), names[x], names[y], y in names, hash(x) == hash(x)]


def module_to(make: Make) -> Any:
    module = nn.Linear(6, 5)
    module.weight = nn.Parameter(make(X.float(), False))
    weight = module.weight
    module.double()
    middle = module.weight.dtype
    module(torch.ones(2, 6, dtype=torch.float64))[:, :5].mul(0).sum().backward()
    module.weight.grad = make(X, False)
    module.to(torch.float32)
    return [
        middle, module.weight is weight, module.weight.grad.dtype, module.weight.grad,
        module.weight, isinstance(module.weight, nn.Parameter), module.weight.is_leaf,
    ]


def state_dicts(make: Make) -> Any:
    one, other = nn.Linear(6, 5), nn.Linear(6, 5)
    one.weight, other.weight = nn.Parameter(make(X, False)), nn.Parameter(make(X * 0, False))
    state = one.state_dict()
    other.load_state_dict(state)
    return [state["weight"], other.weight, state["weight"].requires_grad]


def copies(make: Make) -> Any:
    x = make(X)
    x.tag = "kept"
    (x * x).sum().backward()
    deep, shallow = copy.deepcopy(x), copy.copy(x)
    with torch.no_grad():
        deep.zero_()
        shallow.add_(1)
    parameter = nn.Parameter(make(X, False))
    (parameter * 2).sum().backward()
    again = copy.deepcopy(parameter)
    return [
        x, deep, deep.grad, deep.tag, shallow, shallow.requires_grad,
        isinstance(again, nn.Parameter), again.grad is None, again.requires_grad, again,
    ]


def deepcopy_of_results(make: Make) -> Any:
    copy.deepcopy(make(X) * 2)


def to_in_all_forms(make: Make) -> Any:
    x, whole = make(X), make(torch.arange(5))
    plain = torch.ones(2, dtype=torch.float32)
    outs = [
        x.to(torch.float32), x.to("cpu"), x.to(torch.device("cpu"), torch.float16),
        x.to("cpu", torch.float32, False, True), x.to(plain), x.to(dtype=torch.bfloat16),
        x.to(device="cpu"), x.float(), x.half(), x.double(), x.int(), x.bool(), x.bfloat16(),
        x.type(torch.float32), x.type_as(plain), x.cpu(), x.to(torch.float64, copy=True),
        x.to(whole), whole.to(x), x.to(torch.float32, memory_format=torch.preserve_format),
    ]
    identical = [
        x.to(torch.float64) is x, x.double() is x, x.to("cpu") is x, x.cpu() is x,
        x.to(torch.float64, copy=True) is x, x.contiguous() is x, x.type(torch.float64) is x,
        x.type_as(x) is x, x.to(x) is x,
    ]
    x.to(torch.float32).sum().backward()
    dtypes = [(str(one.dtype), one.requires_grad) for one in outs]
    return [outs, identical, dtypes, x.grad, plain.to(x).dtype]


def copying(make: Make) -> Any:
    x = make(X, False)
    seen = []
    for source in (torch.zeros(5, 6), make(X + 1, False), torch.ones(6), make(X.float(), False)):
        seen.append(x.copy_(source).clone())
    plain = torch.zeros(5, 6)
    plain.copy_(make(X, False))
    source, target = make(X), make(X * 0, False)
    target.copy_(source * 2)
    (target * target).sum().backward()
    return [seen, plain, source.grad]


PROGRAMS = [
    facts, transposes, complex_parts, requires_grad, requires_grad_of_integers,
    requires_grad_of_results, gradient_assigned, gradient_in_place, gradient_of_results, data_of,
    data_of_another_shape, versions, parameters, in_sets_and_dicts, module_to, state_dicts, copies,
    deepcopy_of_results, to_in_all_forms, copying,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_attributes(program: Any, way: str) -> None:
    agree(program, way)


def test_kinds_are_kept() -> None:
    def on_rank(mesh: Any) -> list[bool]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        return [
            type(one) is ShardTensor
            for one in (nn.Parameter(x), x.data, x.detach(), x.T, copy.copy(x), copy.deepcopy(x))
        ]

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [[True] * 6] * 2


def test_gradient_is_redistributed() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x"))
        x.grad = weft.distribute_tensor(X, mesh, P(None, "x"))
        p = weft.distribute_tensor(X, mesh, P(partial={"x": "sum"}))
        p.grad = weft.distribute_tensor(X, mesh, P("x"))
        laid = str(x.grad.sharding), str(p.grad.sharding)
        return *laid, x.grad.full_tensor(), p.grad.full_tensor()

    for sharded, whole, one, other in weft.testing.run(on_rank, mesh={"x": 2}):
        assert (sharded, whole) == ("[5@x, 6]", "[5, 6]")
        assert torch.equal(one, X) and torch.equal(other, X)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [(torch.ones(3, 6, dtype=torch.float64), "torch.float64 of shape (3, 6)"),
     (torch.ones(5, 6, dtype=torch.float32), "torch.float32 of shape (5, 6)")],
)
def test_wrong_gradients_are_refused(wrong: torch.Tensor, text: str) -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with pytest.raises(LayoutError) as caught:
            x.grad = wrong
        return str(caught.value)

    for said in weft.testing.run(on_rank, mesh={"x": 2}):
        assert said.splitlines() == [
            f"x.grad = g: x is torch.float64 of shape (5, 6), g is {text}.",
            "  Rule: a gradient has the global shape and dtype of its tensor.",
            f"  Offenders: {tuple(wrong.shape)}, {wrong.dtype}",
            "  Fix: x.grad = g.to(x.dtype).reshape(x.shape)",
        ]


@ranks(x=2)
def test_layout_is_the_attribute_of_torch_and_sharding_the_layout(mesh: Any) -> None:
    x = weft.distribute_tensor(torch.arange(6.0), mesh, P("x"))
    assert x.sharding == Layout(mesh, (6,), P("x")) and x.sharding != torch.strided
    for one in (x, x + 1, x.detach().requires_grad_(), torch.nn.Parameter(x)):
        assert one.layout is torch.strided and one.layout in {torch.strided}
    made = torch.zeros(3, dtype=x.dtype, layout=x.layout, device=x.device)  # as models do
    assert made.layout is torch.strided
    assert x.new_zeros(3, layout=x.layout).layout is torch.strided
    assert torch.zeros_like(x, layout=x.layout).sharding == x.sharding


@ranks(x=2)
def test_where_the_memory_is_asks_for_nothing_to_be_gathered(mesh: Any) -> None:
    x = weft.distribute_tensor(torch.arange(6.0), mesh, P("x"))
    with weft.strict():
        assert not x.is_pinned()


OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.and_,
             operator.or_, operator.xor)


@pytest.mark.parametrize("function", OPERATORS, ids=lambda function: function.__name__)
def test_the_first_operand_says_how_a_result_lies(function: Any) -> None:
    """Also where Python asks the second one first, as it does beside a plain tensor."""
    first, second = torch.arange(12).view(3, 4), torch.arange(1, 13).view(4, 3)

    def on_rank(mesh: Any) -> list[Any]:
        turned = weft.distribute_tensor(second, mesh, P("x")).t()
        return [(each.stride(), each.full_tensor()) for each in (
            function(first, turned), function(turned, first), function(3, turned))]

    due = [function(first, second.t()), function(second.t(), first), function(3, second.t())]
    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        for (stride, value), expected in zip(found, due):
            assert stride == expected.stride() and torch.equal(value, expected)


def test_the_gradient_of_an_expanded_leaf_has_memory_for_each_element() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.ones(1, 6, mesh=mesh, spec=P(None, "x")).expand(5, 6).detach().requires_grad_()
        (x * X.float()).sum().backward()
        x.grad.mul_(2)  # type: ignore[union-attr]
        return x.stride(), x.grad.stride(), x.grad.full_tensor()  # type: ignore[union-attr]

    for of_x, of_grad, value in weft.testing.run(on_rank, mesh={"x": 2}):
        assert of_x == (0, 1) and of_grad == (6, 1) and torch.equal(value, X.float() * 2)
