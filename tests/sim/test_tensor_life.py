"""Making, copying, converting and freeing ShardTensors, alone and in modules: as plain tensors."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import weft
from tests.sharded import Make, agree, in_ways
from weft import P, ShardTensor, UnsupportedOpError

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
V = torch.arange(5, dtype=torch.float64)
IMAGES = torch.arange(240, dtype=torch.float64).view(5, 6, 4, 2)


class Layer(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(make(X, False)), nn.Parameter(make(V, False))
        self.register_buffer("seen", make(X, False))
        self.register_buffer("count", make(torch.arange(6)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def state(module: nn.Module) -> list[Any]:
    return [[name, value] for name, value in module.state_dict().items()]


def factories(make: Make) -> Any:
    x, whole = make(X), make(torch.arange(5))
    made = [
        x.new_zeros(2, 3), x.new_zeros((5, 6)), x.new_zeros([]), x.new_zeros(3, dtype=torch.int32),
        x.new_ones(x.shape), x.new_full((2,), 7), whole.new_full((2,), 3), x.new_empty(2).fill_(3),
        x.new_tensor([1, 2]), x.new_tensor(np.ones(2)), x.new_tensor(3, dtype=torch.int32),
        x.new_empty_strided((2, 3), (1, 2)).fill_(1), x.new([1, 2]), x.new(2, 3).zero_(),
        x.new_tensor(make(X, False), dtype=torch.float32), x.new_tensor([x.detach().sum(), 1.0]),
        torch.zeros_like(x), torch.ones_like(x, dtype=torch.int32), torch.full_like(x, 2.5),
        torch.full_like(x, 2.5, dtype=torch.float32), torch.full_like(whole, 2.7),
        torch.empty_like(x).fill_(2), torch.zeros_like(x.t()), torch.ones_like(x.sum()),
        torch.zeros_like(x.t(), memory_format=torch.contiguous_format),
    ]
    return [made, [[one.dtype, one.stride(), one.requires_grad] for one in made]]


def factories_of_leaves(make: Make) -> Any:
    """What asks for a gradient is a leaf, and gets it, whatever the layout."""
    x, total = make(X, False), 0
    leaves = [
        x.new_zeros((5, 6), requires_grad=True), x.new_full((6,), 1.5, requires_grad=True),
        torch.ones_like(x, requires_grad=True), torch.full_like(x, 2.0, requires_grad=True),
        x.new_tensor([1.0] * 6, requires_grad=True), torch.zeros_like(x[0], requires_grad=True),
    ]
    for leaf in leaves:
        total = total + (leaf * x).sum() + (leaf * leaf).sum()
    total.backward()
    return [[leaf.is_leaf, leaf.requires_grad, leaf.grad] for leaf in leaves]


def memory_formats(make: Make) -> Any:
    x = make(IMAGES)
    y = x.contiguous(memory_format=torch.channels_last)
    made = [
        y, y + 1, y.clone(), y.contiguous(), y.double(), y.float(), y.permute(0, 2, 3, 1),
        F.relu(y), torch.zeros_like(y), y.clone(memory_format=torch.contiguous_format), y.detach(),
        x.to(memory_format=torch.channels_last), x.to(torch.float32).to(y),
        torch.full_like(x, 2, memory_format=torch.channels_last),
    ]
    (y * y).sum().backward()
    return [
        made, [[one.stride(), one.dim_order()] for one in made], x.grad,
        y.is_contiguous(), y.is_contiguous(memory_format=torch.channels_last),
    ]


def memory_formats_of_images_of_one_channel(make: Make) -> Any:
    y = make(IMAGES[:, :1, None]).to(memory_format=torch.channels_last_3d)
    m = nn.Module()
    m.weight = nn.Parameter(make(X[:, :3, None, None].contiguous(), False))
    m.to(memory_format=torch.channels_last)  # type: ignore
    return [y, y.stride(), m.weight, m.weight.stride(), m.weight.is_leaf]


def old_types(make: Make) -> Any:
    x = make(X)
    made = [
        x.type("torch.FloatTensor"), x.type(torch.LongTensor), x.type(dtype=torch.int32),
        x.type(torch.float32, non_blocking=True), make(torch.arange(3)).type("torch.HalfTensor"),
    ]
    made[0].sum().backward()
    same = [x.type("torch.DoubleTensor") is x, x.type(torch.float64) is x]
    return [made, [one.dtype for one in made], x.type(), made[1].type(), x.grad, same]


def old_type_that_is_none(make: Make) -> Any:
    make(X).type("torch.NoTensor")


def deepcopies_together(make: Make) -> Any:
    x = make(X, False)
    both = copy.deepcopy({"x": x, "again": x, "flat": [x.view(-1, 1)]})
    both["x"].zero_()
    module = Layer(make)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
    return [both["again"] is both["x"], both["x"], x, state(module), state(twin)]


def set_to_another(make: Make) -> Any:
    x, y = make(X, False), make(X + 1, False)
    same = x.set_(y) is x
    y.zero_()
    p = nn.Parameter(make(X, False))
    with torch.no_grad():
        p.set_(make(X + 1, False))
    (p * p).sum().backward()
    return [same, x, p, p.grad]


def module_to_twice(make: Make) -> Any:
    """Gradients follow their parameters, whose layout a conversion may change."""
    module, seen = Layer(make), []
    for dtype in (torch.float64, torch.float32, torch.float64):
        module.to(dtype)
        module(make(X.to(dtype), False)).sum().backward()
        seen += [module.weight.grad.clone(), module.bias.grad.dtype, module.seen, module.count]
    return [seen, module.weight, module.weight.is_leaf, isinstance(module.weight, nn.Parameter)]


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """The same value in another layout, where it has one."""
    if not isinstance(x, ShardTensor):
        return x.detach().clone()
    names = x.device_mesh.axis_names
    free = P(*(None for _ in x.shape[1:]), names[-1])
    return x.detach().redistribute(placements=P() if free == x.spec else free)


def data_in_another_layout(make: Make) -> Any:
    """A graph of before finds its way to the tensor as it lies now."""
    x, w, b = make(X / 8), make(X.T.contiguous()), make(X[0])

    def loss() -> torch.Tensor:
        return ((x * b) @ w).tanh().sum() + (b * b).sum() + (w * w).sum()

    before = loss()
    before.backward(retain_graph=True)
    for one in (x, w, b):
        one.data = elsewhere(one)
    (before + loss()).backward(retain_graph=True)
    kept = [one.grad.clone() for one in (x, w, b)]
    for one in (x, b):
        one.data = elsewhere(one)
    before.backward()
    loss().backward()
    return [kept, [one.grad for one in (x, w, b)]]


def data_in_another_layout_with_hooks(make: Make) -> Any:
    """Set between backwards: hooks stay with the tensor."""
    x, w, seen = make(X / 8), make(X.T.contiguous()), []
    handle = w.register_hook(lambda g: (seen.append(g.clone()), g.clamp(0, 1))[1])
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    for place in range(3):
        loss = (x @ w).tanh().sum() + w.exp().sum()
        loss.backward()  # and its graph lives on
        for one in (x, w):
            one.data = elsewhere(one)
        if place == 1:
            handle.remove()
    return [x.grad, w.grad, len(seen), sum(one.sum() for one in seen)]


def loading(make: Make) -> Any:
    there, seen = Layer(make), []
    plain = {"weight": X * 2, "bias": V * 3, "seen": X * 4, "count": torch.arange(6) * 5}
    for assign in (False, True):
        for given in (there.state_dict(), plain):
            module = Layer(make)
            module.weight.data.zero_()
            told = str(module.load_state_dict(given, assign=assign))
            seen += [told, state(module), isinstance(module.weight, nn.Parameter)]
            seen += [module.weight.requires_grad, module.weight.is_leaf]
    kept = str(Layer(make).load_state_dict({"weight": make(X, False)}, strict=False))
    return [seen, kept]


def loading_another_shape(make: Make) -> Any:
    with pytest.raises(RuntimeError, match="shape"):  # of modules' own kind: test_nn_modules
        Layer(make).load_state_dict({**Layer(make).state_dict(), "weight": make(X[:4], False)})


def loading_by_swap(make: Make) -> Any:
    module = Layer(make)
    weight = module.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict({**module.state_dict(), "weight": make(X * 2, False)})
        after = [module.weight is weight, module.weight.detach().clone()]
        module.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return [after, module.weight is weight, module.weight, module.weight.requires_grad]


def containers(make: Make) -> Any:
    several = nn.ParameterList([make(X, False), nn.Parameter(make(V, False))])
    several.append(make(X + 1))
    named = nn.ParameterDict({"a": make(X, False), "b": nn.Parameter(make(V, False))})
    module = nn.Module()
    module.b, module.c = nn.Buffer(make(X, False)), nn.Buffer(make(V, False), persistent=False)
    kinds = [isinstance(one, nn.Parameter) for one in (*several, *named.values(), module.b)]
    return [
        list(several), [named[name] for name in sorted(named)], kinds,
        [name for name, _ in module.named_buffers()], list(module.state_dict()),
        len(list(several.parameters())), len(list(named.parameters())),
    ]


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def parametrized(make: Make) -> Any:
    module = Layer(make)
    parametrize.register_parametrization(module, "weight", Square())
    module(make(X, False)).sum().backward()
    seen = [module.weight.detach().clone(), module.parametrizations.weight.original.grad]
    module.weight = make(X * 4, False)
    with parametrize.cached():
        seen += [module.weight is module.weight, module.weight.detach().clone()]
    parametrize.remove_parametrizations(module, "weight")
    return [seen, module.weight, isinstance(module.weight, nn.Parameter)]


def weight_norms(make: Make) -> Any:
    seen: list[Any] = []
    for norm in (nn.utils.weight_norm, parametrizations.weight_norm):
        for dim in (0, 1, None):
            module = Layer(make)
            norm(module, "weight", dim=dim)  # type: ignore
            out = module(make(X, False))
            out.sum().backward()
            found = dict(module.named_parameters())
            seen += [out, [[name, found[name].grad] for name in sorted(found)]]
    return seen


def vectors(make: Make) -> Any:
    module = Layer(make)
    vector = nn.utils.parameters_to_vector(module.parameters())
    (vector * vector).sum().backward()
    nn.utils.vector_to_parameters(make(torch.arange(35).double(), False), module.parameters())
    return [vector, module.weight.grad, module.bias.grad, state(module)]


def clipping(make: Make) -> Any:
    seen = []
    for kind, foreach in ((2.0, None), (float("inf"), None), (1.0, False), (3.5, True)):
        module = Layer(make)
        module(make(X, False)).sum().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0, norm_type=kind, foreach=foreach)
        seen += [norm, module.weight.grad.clone(), module.bias.grad.clone()]
        nn.utils.clip_grad_value_(module.parameters(), 0.05, foreach=foreach)
        seen += [module.weight.grad, module.bias.grad]
    return seen


def swapping(make: Make) -> Any:
    a, b = nn.Parameter(make(X, False)), nn.Parameter(make(X + 1, False))
    a.tag = 1
    torch.utils.swap_tensors(a, b)
    (a * a).sum().backward()
    return [a, b, a.grad, b.grad is None, b.tag, hasattr(a, "tag")]


def optimizer_states(make: Make) -> Any:
    first, other = Layer(make), Layer(make)
    one = torch.optim.Adam(first.parameters(), foreach=False)
    first(make(X, False)).sum().backward()
    one.step()
    two = torch.optim.Adam(other.parameters())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    other(make(X, False)).sum().backward()
    two.step()
    return [two.state_dict()["state"][0]["exp_avg"], state(other)]


def weak_references(make: Make) -> Any:
    x, names = make(X), weakref.WeakKeyDictionary()
    ref, names[x] = weakref.ref(x), "x"
    seen = [ref() is x, names[x]]
    del x
    gc.collect()
    return [seen, ref() is None, len(names)]


def split_at_a_tensor(make: Make) -> Any:
    x = make(X)
    return [torch.tensor_split(x, torch.tensor([1, 3])), x.tensor_split(make(torch.tensor(2)), 1)]


PROGRAMS = [
    factories, factories_of_leaves, memory_formats, memory_formats_of_images_of_one_channel,
    old_types, old_type_that_is_none, deepcopies_together, set_to_another, module_to_twice, loading,
    loading_another_shape, loading_by_swap, containers, parametrized, weight_norms, vectors,
    clipping, swapping, optimizer_states, weak_references, split_at_a_tensor,
    data_in_another_layout, data_in_another_layout_with_hooks,
]


def test_a_graph_of_before_and_hooks() -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        loss = (x * x).sum()
        x.register_hook(lambda g: g.clamp(0, 1))
        x.data = x.detach().redistribute(placements=P(None, "x"))
        with pytest.raises(UnsupportedOpError) as caught:
            loss.backward()
        return str(caught.value)

    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == other and first.splitlines() == [
        "backward: x, which has hooks, was [5@x, 6] when this graph was made, and `x.data = ` has "
        "made it [5, 6@x].",
        "  Rule: a hook sees the gradients of all uses at once, but the two graphs give theirs one "
        "after the other.",
        "  Offenders: [5, 6@x]",
        "  Fix: run the forward again, or set x.data after the backward",
    ]


def test_gradients_of_a_graph_from_before_the_data_was_laid_anew() -> None:
    """torch.autograd.grad cannot give them, and says so; of graphs made since it does."""
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        early = (x * x).sum()
        x.data = x.detach().redistribute(placements=P(None, "x"))
        late = (x * 3).sum()
        (grad,) = torch.autograd.grad(late, x)
        torch.testing.assert_close(grad.full_tensor(), torch.full_like(X, 3))
        ways: list[dict[str, Any]] = [{}, {"allow_unused": True}, {"materialize_grads": True}]
        for options in ways:
            with pytest.raises(UnsupportedOpError) as told:
                torch.autograd.grad(early + (x * 3).sum(), x, retain_graph=True, **options)
        early.backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * X)
        return str(told.value).splitlines()[0]

    assert set(weft.testing.run(on_rank, mesh={"x": 2})) == {
        "torch.autograd.grad(y, x): y was computed before `x.data = ` gave x another layout."
    }


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:new_empty_strided.*:weft.WeftWarning")
@pytest.mark.parametrize("program, way", in_ways(PROGRAMS))
def test_life(program: Any, way: str) -> None:
    agree(program, way)


def _is_freed(make_and_use: Any) -> list[bool]:
    """Whether the local tensor that is returned is gone when the function is, uncollected."""
    def on_rank(mesh: Any) -> bool:
        def run() -> Any:
            return weakref.ref(make_and_use(weft.distribute_tensor(
                X, mesh, P("x"), src_data_rank=None).requires_grad_()))

        run()  # the first call of a process imports
        gc.collect()
        gc.disable()
        try:
            return run()() is None
        finally:
            gc.enable()

    return weft.testing.run(on_rank, mesh={"x": 2})


def _hooked(x: ShardTensor) -> Tensor:
    x.register_hook(lambda grad: None)
    x.register_post_accumulate_grad_hook(lambda x: None)
    (x * 2).sum().backward()
    return x._local


def _optimized(x: ShardTensor) -> Tensor:
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    (x * x).sum().backward()
    optimizer.step()
    return optimizer.state[x]["momentum_buffer"]._local


def _without_gradient(x: ShardTensor) -> Tensor:
    _LIVING.append(x)
    (x * x).sum().backward()
    grad = x.grad
    assert grad is not None
    x.grad = None
    return grad._local


def _read(x: ShardTensor) -> Tensor:
    assert x.sum().item() and x.detach().numpy().any() and repr(x) and x.tolist()
    copy.deepcopy(x)
    return x._local


_LIVING: list[Any] = []


@pytest.mark.parametrize("use", [_hooked, _optimized, _without_gradient, _read])
def test_memory_is_freed_at_once(use: Any) -> None:
    assert _is_freed(use) == [True, True]
    _LIVING.clear()


@pytest.mark.parametrize("use", [
    lambda x: x.masked_select(x > 0), torch.nonzero, torch.unique,
    lambda x: torch.nn.functional.ctc_loss(
        x[..., None].expand(-1, -1, 3), torch.ones(x.shape[1], 2, dtype=torch.int64),
        torch.full((x.shape[1],), len(x)), torch.full((x.shape[1],), 2)),
])
def test_a_call_that_needs_data_keeps_no_operand(use: Any) -> None:
    """What says that it needs them has frames, and these have operands: at each new length."""
    def on_rank(mesh: Any) -> list[bool]:
        alive = []
        for length in (6, 8, 10):  # the first call of a process imports
            x = weft.randn(8, length, mesh=mesh, placements=P("x"))
            ref = weakref.ref(x)
            use(x)
            del x
            alive.append(ref() is not None)
        return alive[1:]

    gc.collect()
    gc.disable()
    try:
        assert weft.testing.run(on_rank, mesh={"x": 2}) == [[False] * 2] * 2
    finally:
        gc.enable()


def test_a_hook_outlives_its_tensor() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        seen: list[Any] = []
        x.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.full_tensor()))
        loss = (x * x).sum()
        del x
        loss.backward()
        return seen

    for seen in weft.testing.run(on_rank, mesh={"x": 2}):
        assert len(seen) == 1 and torch.equal(seen[0], 2 * X)


@pytest.mark.parametrize(
    ("name", "call", "said"),
    [
        ("sparse", lambda x: torch.zeros_like(x, layout=torch.sparse_coo), "dense"),
        ("to_sparse", lambda x: x.detach().to_sparse(), "dense"),
        ("to_mkldnn", lambda x: x.detach().float().to_mkldnn(), "dense"),
        ("quantized", lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "dense"),
        ("set_ of another shape", lambda x: x.set_(x[0]), "the same shape, dtype and mesh"),
        ("set_ to a plain tensor", lambda x: x.set_(X), "the same shape, dtype and mesh"),
        ("new", lambda x: x.new(X), "sizes and of lists"),
        ("storage_offset", lambda x: x[1:].storage_offset(), "memory layout"),
        ("storage_type", lambda x: x.storage_type(), "memory layout"),
        ("to_dlpack", torch.utils.dlpack.to_dlpack, "memory layout"),
        ("trace", lambda x: torch.jit.trace(lambda x: x * 2, x), "works on plain tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
@pytest.mark.filterwarnings("ignore::weft.WeftWarning", "ignore:.*deprecated.*:UserWarning")
def test_refusals(name: str, call: Any, said: str) -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
        with pytest.raises(UnsupportedOpError) as caught:
            call(x)
        return str(caught.value)

    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert first == other and said in first.splitlines()[1]
    assert first.splitlines()[2].startswith("  Offenders: ")
