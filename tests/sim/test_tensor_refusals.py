"""What weft does not do it refuses clearly, on every rank, or it does it exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.jit import _get_trace_graph

import weft
from weft import P, Replicate, ShardTensor, UnsupportedOpError

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 32
REPLICATE: Any = [Replicate()]
NO_MESH: Any = Any


class Weighted(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


MEMORY: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage().data_ptr(),
    "storage": lambda x: x.storage(),
    "resize_": lambda x: x.resize_(2, 2),
    "set_": lambda x: x.set_(torch.ones(3).double()),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 1)),
    "resize_as_": lambda x: x.resize_as_(x[:1]),
    "share_memory_": lambda x: x.share_memory_(),
    "share_memory_ of a module": lambda x: Weighted(x).share_memory(),
    **({"const_data_ptr": lambda x: x.const_data_ptr()}
       if hasattr(torch.Tensor, "const_data_ptr") else {}),  # torch 2.11 lacks it
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "dlpack": lambda x: np.from_dlpack(x),
    "apply_": lambda x: x.apply_(lambda a: a + 1),
    "map_": lambda x: x.map_(x, lambda a, b: a + b),
    "map_ of a plain tensor": lambda x: X.clone().map_(x, lambda a, b: a + b),
    "map2_": lambda x: x.map2_(x, x, lambda a, b, c: a + b + c),
    "gradcheck": lambda x: torch.autograd.gradcheck(square, x),
    "gradgradcheck": lambda x: torch.autograd.gradgradcheck(square, x),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "torch.tensor": torch.tensor,
    "linearize": lambda x: torch.func.linearize(square, x),
    "linearize around": lambda x: torch.func.linearize(lambda a: (a * x).sum(), X),
    "functionalize": lambda x: torch.func.functionalize(square)(x),
    "jacobian forward": lambda x: torch.autograd.functional.jacobian(
        square, x, vectorize=True, strategy="forward-mode"
    ),
    "make_dual": lambda x: dual(x, x),
    "make_dual tangent": lambda x: dual(X.clone(), x),
    "dual operand": lambda x: dual(X.clone(), X, lambda made: (x * made).sum()),
    "jit.trace function": lambda x: torch.jit.trace(square, (X,))(x),  # type: ignore
    "jit.script method": lambda x: torch.jit.script(nn.Linear(6, 3).double())(x),
    "jit.script parameters": lambda x: torch.jit.script(Weighted(x)),
    "jit.trace": lambda x: torch.jit.trace(square, (x,)),
    "jit.trace around": lambda x: torch.jit.trace(lambda a: (a * x).sum(), (X.clone(),)),
    "jit.trace parameters": lambda x: torch.jit.trace(Weighted(x), (X.clone(),)),
    "jit.trace_module": lambda x: torch.jit.trace_module(Weighted(x), {"forward": (X.clone(),)}),
    "jit.trace_module input": lambda x: torch.jit.trace_module(Weighted(X), {"forward": (x,)}),
    "export": lambda x: torch.export.export(Weighted(X), (x,)),
    "DTensor.from_local": lambda x: DTensor.from_local(x, None, REPLICATE),
    "torch's distribute_tensor": lambda x: distribute_tensor(x, None, REPLICATE),
    "context_parallel": lambda x: context_parallel(NO_MESH, buffers=[x], buffer_seq_dims=[0]),
    "export parameters": lambda x: torch.export.export(Weighted(x), (X.clone(),)),
    "export strict": lambda x: torch.export.export(Weighted(x), (X.clone(),), strict=True),
}


def refusal(
    call: Callable[[Any], Any], spec: P | None = None, recorded: bool = False
) -> list[str]:
    """What both ranks are told, the same."""
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P("x") if spec is None else spec)
        x.requires_grad_(recorded)
        with pytest.raises(UnsupportedOpError) as caught:
            call(x)
        return str(caught.value).splitlines()

    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == other
    assert first[1].startswith("  Rule: ") and first[2].startswith("  Offenders: ")
    assert first[3].startswith("  Fix: ")
    return first


@pytest.mark.parametrize("name", MEMORY)
def test_memory(name: str) -> None:
    refusal(MEMORY[name])
    refusal(MEMORY[name], P())


def dual(primal: Any, tangent: Any, use: Any = None) -> Any:
    with forward_ad.dual_level():
        made = forward_ad.make_dual(primal, tangent)
        return made if use is None else use(made)


SHOULD = pytest.mark.filterwarnings(
    "ignore:To copy construct from a tensor", "ignore:.*torch.jit.* is deprecated",
)


@SHOULD
@pytest.mark.parametrize("name", ["make_dual", "linearize"])
def test_forward_derivatives_are_those_of_jvp(name: str) -> None:
    """What the refusals name, works."""
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x"))
        tangent: Any = torch.func.jvp(square, (x,), (x + 1,))[1]
        torch.testing.assert_close(tangent.full_tensor(), (2 * X * (X + 1)).sum())
        with pytest.raises(UnsupportedOpError) as caught:
            dual(x, x) if name == "make_dual" else torch.func.linearize(square, x)
        return str(caught.value)

    for said in weft.testing.run(on_rank, mesh={"x": 2}):
        assert "torch.func.jvp(fn, (x,), (tangent,))" in said.partition("  Fix: ")[2]


@SHOULD
@pytest.mark.parametrize("recorded", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, recorded: bool) -> None:
    refusal(TRANSFORMS[name], recorded=recorded)


@SHOULD
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_what_is_refused_of_sharded_tensors_works_on_plain_ones() -> None:
    """weft has taken these functions over."""
    for made in (torch.jit.script(square), torch.jit.trace(square, (X,))):
        assert torch.equal(made(X), square(X))  # type: ignore
    for made in (
        torch.jit.script(Weighted(X)), torch.jit.trace_module(Weighted(X), {"forward": (X,)}),
        torch.export.export(Weighted(X), (X,)),
    ):
        run = made.module() if isinstance(made, torch.export.ExportedProgram) else made
        assert torch.equal(run(X), X * X)
    out, jvp = torch.func.linearize(square, X)
    assert out == square(X) and abs(jvp(X) - 2 * out) < 1e-9
    assert torch.nested.as_nested_tensor([X, X], layout=torch.jagged).size(0) == 2
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(X).tangent is None


@SHOULD
def test_a_scripted_function_is_called_as_the_python_function() -> None:
    """Another scripted function, and a default, are inside."""
    inner = torch.jit.script(square)

    def outer(x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
        return (x / by).tanh() * by + inner(x)

    call = torch.jit.script(outer)

    def on_rank(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        out = call(x, by=2.0)
        out.sum().backward()
        assert out.sharding == x.sharding
        return out.full_tensor(), x.grad.full_tensor()

    plain = X.clone().requires_grad_()
    due = call(plain, by=2.0)
    due.sum().backward()
    for out, gradient in weft.testing.run(on_rank, mesh={"x": 2}):
        torch.testing.assert_close(out, due)
        torch.testing.assert_close(gradient, plain.grad)


def test_gradients_are_checked_of_full_tensors() -> None:
    """As the refusal of gradcheck says."""
    def on_rank(mesh: Any) -> list[bool]:
        def program(full: torch.Tensor) -> torch.Tensor:
            x = ShardTensor.from_local(full, mesh, [Replicate()]).redistribute(placements=P("x"))
            return (x * x * x).sum(0).full_tensor()

        full = X.clone().requires_grad_()
        return [
            torch.autograd.gradcheck(program, full), torch.autograd.gradgradcheck(program, full),
            torch.autograd.gradcheck(lambda a: program(a) + a.detach().sum(0), full,
                                     raise_exception=False),
        ]

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [[True, True, False]] * 2


def test_branches_are_taken_without_capture() -> None:
    def on_rank(mesh: Any) -> list[Any]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        return [
            torch.cond(x.sum() > bound, lambda a: a * 2, lambda a: a + 1, (x,)).full_tensor()
            for bound in (0, 1e9)
        ]

    for first, second in weft.testing.run(on_rank, mesh={"x": 2}):
        assert torch.equal(first, X * 2) and torch.equal(second, X + 1)


def test_texts() -> None:
    assert refusal(MEMORY["data_ptr"]) == [
        "data_ptr(): no single address or storage holds a global tensor; the tensor is [5@x, 6].",
        "  Rule: what reads or changes memory works on local tensors.",
        "  Offenders: [5@x, 6]", "  Fix: of this rank's block: x.to_local().data_ptr()",
        "       for a file: safetensors.torch.save_file, save_pretrained and "
        "torch.distributed.checkpoint, called on all ranks",
    ]
    indices = torch.tensor([[0, 1, 2]])
    for make in (lambda x: torch.sparse_coo_tensor(indices, x, (4,)),
                 lambda x: torch.sparse_coo_tensor(x[None].long(), torch.ones(3), (4,))):
        said = refusal(lambda x, make=make: make(x[:3, 0]))
        assert "as of torch.sparse_coo_tensor): a ShardTensor holds indices or values" in said[0]
    assert refusal(TRANSFORMS["functionalize"]) == [
        "aten.mul.Tensor: a ShardTensor reached torch's dispatcher below autograd.",
        "  Rule: weft intercepts above autograd; forward AD, torch.jit, torch.tensor(x), some of "
        "torch.func and tensor classes of other libraries pass it by.",
        "  Offenders: ShardTensor",
        "  Fix: use the tensor method (x.clone(), x.detach(), x.to(dtype)), or x.full_tensor() and "
        "plain torch",
        "       of torch.func: vmap, grad, vjp, jvp, jacrev, jacfwd and hessian, with the "
        "ShardTensors as arguments",
    ]


def test_dropout_that_draws_nothing_works() -> None:
    def on_rank(mesh: Any) -> bool:
        x = weft.distribute_tensor(X, mesh, P("x"))
        return torch.equal(F.dropout(x, 0.5, training=False).full_tensor(), X)

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [True] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_ad_is_exact_or_refused() -> None:
    """Local ops carry tangents; communication would lose them."""
    def on_rank(mesh: Any) -> str:
        dual = forward_ad.make_dual(X, X + 1)
        x = ShardTensor.from_local(dual, mesh, P("x"))
        square = forward_ad.unpack_dual((x * x).to_local())
        assert square.tangent is not None and torch.equal(square.tangent, 2 * X * (X + 1))
        primal, tangent = forward_ad.unpack_dual(x * 3)
        assert tangent is not None and tangent.sharding == primal.sharding == x.sharding
        assert torch.equal(tangent.to_local(), 3 * (X + 1))
        plain = weft.distribute_tensor(X, mesh, P("x"))
        assert forward_ad.unpack_dual(plain) == (plain, None)
        total = x.sum(0)
        assert total.sharding.is_partial
        with pytest.raises(UnsupportedOpError) as caught:
            total.redistribute(placements=[Replicate()])
        return str(caught.value)

    with forward_ad.dual_level():
        for said in weft.testing.run(on_rank, mesh={"x": 2}):
            assert said.splitlines() == [
                "transition P(sum)->I on x: it was given a dual tensor.",
                "  Rule: forward AD, vmap and torch.func do not reach through communication.",
                "  Offenders: dual tensor",
                "  Fix: torch.autograd.grad on ShardTensors, or the transform on x.full_tensor()",
            ]


def test_writes_to_views_that_have_no_inverse_are_refused() -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x"))
        y = x.unfold(0, 2, 1)
        with pytest.raises(UnsupportedOpError) as caught:
            y.zero_()
        assert torch.equal(x.full_tensor(), X)
        assert torch.equal(y.full_tensor(), X.unfold(0, 2, 1))
        return str(caught.value)

    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == other and first.splitlines() == [
        "aten.unfold.default: it was written to through a view [4@x, 6, 2] whose data had to "
        "move, and has no known inverse.",
        "  Rule: a write through a view reaches its base where they share memory, or by the "
        "inverse of the view op.",
        "  Offenders: aten.unfold.default",
        "  Fix: write to the base, or clone() the view first",
    ]


def test_mismatched_shapes_are_refused_before_communication() -> None:
    """Also where calls of the same structure are known already."""
    def on_rank(mesh: Any) -> list[str]:
        def laid(*shape: int) -> Any:
            return weft.ones(*shape, mesh=mesh, spec=P("x"))

        laid(5, 4) + laid(5, 4)
        laid(5, 4) @ laid(4, 7)
        F.linear(laid(5, 4), laid(7, 4))
        said = []
        with weft.explain() as log:
            for call in (
                lambda: laid(5, 4) + laid(6, 4), lambda: laid(4, 4) + laid(3, 4),
                lambda: laid(5, 4) @ laid(5, 7), lambda: laid(5, 6) @ laid(5, 7),
                lambda: F.linear(laid(5, 4), laid(7, 3)), lambda: laid(5, 4) + torch.ones(3),
                lambda: laid(5, 4).view(7, 3), lambda: laid(5, 4).sum(2), lambda: laid(5, 4)[7],
                lambda: torch.cat([laid(5, 4), laid(5, 3)]), lambda: laid(5, 4).transpose(0, 2),
                lambda: laid(5, 4).add_(laid(6, 4)), lambda: laid(5, 4).copy_(torch.ones(3, 4)),
                lambda: laid(5, 4).slice_scatter(laid(3, 4), 0, 2, 4),
                lambda: laid(5, 4).slice_scatter(laid(1, 4), 0, 2, 4),
                lambda: laid(5, 4).requires_grad_().slice_scatter(laid(3, 4), 0, 2, 4),
                lambda: laid(5, 4).select_scatter(laid(3), 0, 2),
                lambda: laid(5, 4).diagonal_scatter(laid(3)),
                lambda: laid(0, 4).max(), lambda: laid(5, 0).requires_grad_().min(),
            ):
                with pytest.raises((RuntimeError, IndexError)) as caught:
                    call()
                said.append(str(caught.value))
        assert not log.events
        return said

    first, *others = weft.testing.run(on_rank, mesh={"x": 3})
    assert others == [first] * 2


def test_how_many_bytes_is_no_secret() -> None:
    """As torchinfo adds them up."""
    def on_rank(mesh: Any) -> tuple[int, int, int, str]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        storage = x.untyped_storage()
        return storage.nbytes(), len(storage), sys.getsizeof(storage), str(storage.device)

    for nbytes, length, size, device in weft.testing.run(on_rank, mesh={"x": 2}):
        assert (nbytes, length, device) == (X.nbytes, X.nbytes, "cpu") and size >= X.nbytes


def count_by_trace(mesh: Any, module: nn.Module, x: Any) -> None:
    """As fvcore counts operations, which imports the function by name."""
    _get_trace_graph(module, (x,))


@pytest.mark.parametrize("kind", ["module", "input"])
def test_a_trace_that_counts_is_refused(kind: str) -> None:
    def on_rank(mesh: Any) -> str:
        module, x = nn.Linear(6, 2).double(), X
        if kind == "module":
            weft.distribute_module(module, mesh)
        else:
            x = weft.distribute_tensor(X, mesh, P("x"))
        with pytest.raises(UnsupportedOpError) as error:
            count_by_trace(mesh, module, x)
        return str(error.value)

    first, second = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == second and first.startswith("torch.jit._get_trace_graph(...): ")


def test_a_trace_of_plain_tensors_goes_on() -> None:
    graph, _ = _get_trace_graph(nn.Linear(6, 2).double(), (X,))
    assert "linear" in str(graph)
