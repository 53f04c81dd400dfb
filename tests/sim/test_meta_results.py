"""Forms of results that are told without torch's meta kernels are those that torch finds."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

import weft
from tests.harness import local_part, ranks
from tests.oracle import order
from weft import Layout, P, ShardTensor
from weft.tensor.trace.capture import capture
from weft.tensor.trace.meta_results import known_result

aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def losses() -> Iterator[tuple[Any, ...]]:
    for shape, dtype, reduction, weighted in itertools.product(
        [(5, 3), (4, 3, 2), (4, 3, 2, 5), (0, 3)],
        [torch.float32, torch.bfloat16, torch.float64], [0, 1, 2], [False, True],
    ):
        x = torch.empty(shape, dtype=dtype, device="meta")
        target = torch.empty((shape[0], *shape[2:]), dtype=torch.int64, device="meta")
        weight = torch.empty(3, dtype=dtype, device="meta") if weighted else None
        yield x, target, weight, reduction, -100, 0.1
        yield x.mT.contiguous().mT, target, weight, reduction


def attentions() -> Iterator[tuple[Any, ...]]:
    for batch, dtype, causal in itertools.product(
        [(2,), (2, 3), (2, 1, 3)], [torch.float32, torch.bfloat16, torch.float64], [False, True]
    ):
        query = torch.empty((*batch, 5, 4), dtype=dtype, device="meta")
        key = torch.empty((*batch, 6, 4), dtype=dtype, device="meta")
        value = torch.empty((*batch, 6, 7), dtype=dtype, device="meta")
        yield query, key, value, None, 0.0, causal
        turned = torch.empty((*batch[:-1], 5, batch[-1], 4), dtype=dtype, device="meta")
        turned = turned.transpose(-2, -3)
        yield turned, turned, turned, None, 0.0, causal
        if len(batch) == 2:
            yield turned, turned, turned, _meta(5, 1, dtype=dtype), 0.0, causal
            yield turned, turned, turned, _meta(2, 1, 5, 5, dtype=torch.bool), 0.0, causal
            yield turned, turned.contiguous().mT.contiguous().mT, turned, None, 0.0, causal
            few = turned[:, :1].contiguous()
            yield turned, few, few, None, 0.0, causal


@torch.no_grad()
def test_losses_are_told_as_torch_finds_them() -> None:
    overload = aten.cross_entropy_loss.default
    for args in losses():
        told, found = known_result(overload, args, {}), overload(*args)
        assert told is not None
        assert (told.shape, told.dtype, told.stride()) == (found.shape, found.dtype, found.stride())


@torch.no_grad()
def test_attentions_are_told_as_they_are() -> None:
    """As on real tensors: torch's meta kernel does not know where the fused one puts its result."""
    overload = aten.scaled_dot_product_attention.default
    for args in attentions():
        real = [_filled(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        if real[3] is not None and real[5]:
            continue  # torch takes no mask beside is_causal
        options = {"enable_gqa": args[0].shape[:-2] != args[1].shape[:-2]}
        told, found = known_result(overload, args, options), overload(*real, **options)
        assert told is not None
        assert (told.shape, told.dtype, told.stride()) == (found.shape, found.dtype, found.stride())


@torch.no_grad()
def test_layer_norms_are_told_as_they_are() -> None:
    overload = aten.layer_norm.default
    for dtype in (torch.float32, torch.bfloat16):
        x, w = _meta(2, 3, 4, dtype=dtype), _meta(3, 4, dtype=dtype)
        for args in ((x, [4]), (x[:0], [4]), (x, [3, 4], w, w), (x, [3, 4], None, w, 1e-5, True)):
            told, found = known_result(overload, args, {}), overload(*args)
            assert told is not None
            assert (told.shape, told.dtype, told.stride()) == (
                found.shape, found.dtype, found.stride())
        for args in ((x, [3]), (x, [3, 4], w[0]), (x.mT, [3]), (x, []), (x.long(), [4]),
                     (x, [3, 4], w.double())):
            assert known_result(overload, args, {}) is None


def _operands(dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.ones(2, 3, 4, dtype=dtype)
    return [x, x[0], x[:1, :, :1].clone(), x[0, 0, 0].clone(), x[..., ::2], x[:0], x[:1],
            torch.ones(4, 3, dtype=dtype).mT, torch.ones(4, 2, 3, dtype=dtype).permute(1, 2, 0),
            x[:1].mT, x[:1, :1]]


@torch.no_grad()
@pytest.mark.parametrize("names", [
    "abs ceil cos exp gelu leaky_relu log neg relu rsqrt sigmoid silu sin sqrt square tanh",
    "add sub mul div pow maximum clamp_min atan2 fmod", "eq lt logical_and logical_not isnan",
    "bitwise_and bitwise_not", "where masked_fill",
])
def test_elementwise_results_are_told_as_they_are(names: str) -> None:
    """And what torch refuses is left to it."""
    told: set[str] = set()
    draw = random.Random(0)
    for overload, _, num in elementwise():
        name = overload._schema.name.removeprefix("aten::")
        if name not in names.split() or ".out" in str(overload):
            continue
        for _ in range(150):
            dtypes = [draw.choice(_DTYPES)] * 3
            if draw.random() < 0.4:
                dtypes = draw.choices(_DTYPES, k=3)
            if name in ("where", "masked_fill") and draw.random() < 0.8:
                dtypes[name == "masked_fill"] = torch.bool
            args = _arguments(overload, [draw.choice(_operands(one)) for one in dtypes[:num]])
            args = [draw.choice((2, 0.5, True, 1j)) if isinstance(one, (int, float)) else one
                    for one in args]
            found = known_result(overload, [
                one.to("meta") if isinstance(one, torch.Tensor) else one for one in args], {})
            try:
                due = overload(*args)
            except (RuntimeError, TypeError):
                assert found is None, (name, args)
                continue
            if found is not None:
                told.add(name)
                assert found.is_meta
                assert (found.shape, found.dtype, found.stride()) == (
                    due.shape, due.dtype, due.stride()), (name, args)
    assert told == set(names.split())


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@torch.no_grad()
@pytest.mark.parametrize(("overload", "arguments"), [
    (aten.mean.default, [()]),
    (aten.mean.dim, [(0,), ([-1, 0], True), ([], True), (3,), ([0, 0],)]),
    (aten.cumsum.default, [(0,), (-1,), (3,)]), (aten.tril.default, [(), (1,)]),
    (aten.triu.default, [(), (-1,)]),
    (aten.roll.default, [
        ([1],), ([1, 2],), ([1], [0]), ([1, 2], [0, -1]), ([1], [5]), ([1], [0, 1]),
    ]),
])
def test_other_results_are_told_as_they_are(overload: Any, arguments: list[Any]) -> None:
    told = 0
    for dtype in _DTYPES:
        for x, more in itertools.product(_operands(dtype), arguments):
            more = [[one] if overload is aten.mean.dim and type(one) is int else one
                    for one in more]
            try:
                due = overload(x, *more)
            except (RuntimeError, IndexError):
                with contextlib.suppress(RuntimeError, IndexError):
                    assert known_result(overload, (x.to("meta"), *more), {}) is None
                continue
            found = known_result(overload, (x.to("meta"), *more), {})
            if found is not None:
                told += 1
                assert (found.shape, found.dtype, found.stride()) == (
                    due.shape, due.dtype, due.stride()), (x, more)
    assert told


@torch.no_grad()
@pytest.mark.parametrize("overload", [aten.mse_loss.default, aten.l1_loss.default])
def test_distances_are_told_as_they_are(overload: Any) -> None:
    told = 0
    for one, other in itertools.product(_DTYPES[:4], repeat=2):
        for x, target, reduction in itertools.product(_operands(one), _operands(other), range(3)):
            found = known_result(overload, (x.to("meta"), target.to("meta"), reduction), {})
            if found is not None:
                told += 1
                due = overload(x, target, reduction)
                assert (found.shape, found.dtype, found.stride()) == (
                    due.shape, due.dtype, due.stride()), (x, target, reduction)
    assert told


@torch.no_grad()
def test_rms_norms_are_told_as_they_are() -> None:
    x, w = _meta(2, 3, 4), _meta(4)
    for args in ((x, [4]), (x, [4], w), (x, [4], w, 1e-6), (x, [3, 4], None, 1e-6)):
        told, found = known_result(aten.rms_norm.default, args, {}), aten.rms_norm.default(*args)
        assert told is not None
        assert (told.shape, told.dtype, told.stride()) == (found.shape, found.dtype, found.stride())
    for args in ((x, [3]), (x, [4], w.double()), (x.mT, [3])):
        assert known_result(aten.rms_norm.default, args, {}) is None


def _filled(form: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(form, device="cpu")


@torch.no_grad()
@pytest.mark.parametrize("args", [
    (_meta(5, 3), _meta(4, dtype=torch.int64)),
    (_meta(5, 3), _meta(5, 3)),
    (_meta(5, 3), _meta(5, dtype=torch.int64), _meta(4)),
    (_meta(5, 3), _meta(5, dtype=torch.int64), None, 3),
    (_meta(5, 3), _meta(5, dtype=torch.int64), None, 1, -100, 2.0),
    (_meta(5, 3, dtype=torch.int64), _meta(5, dtype=torch.int64)),
])
def test_what_may_be_wrong_is_left_to_torch(args: Any) -> None:
    assert known_result(aten.cross_entropy_loss.default, args, {}) is None


@torch.no_grad()
@pytest.mark.parametrize("args", [
    (_meta(2, 5, 4), _meta(2, 6, 3), _meta(2, 6, 4)),
    (_meta(2, 5, 4), _meta(2, 6, 4), _meta(2, 5, 4)),
    (_meta(2, 5, 4), _meta(1, 6, 4), _meta(2, 6, 4)),
    (_meta(2, 5, 4), _meta(2, 6, 4), _meta(2, 6, 4, dtype=torch.float64)),
    (_meta(2, 5, 4), _meta(2, 6, 4), _meta(2, 6, 4), None, 0.5),
])
def test_attention_that_may_be_wrong_is_left_to_torch(args: Any) -> None:
    assert known_result(aten.scaled_dot_product_attention.default, args, {}) is None


_MATRICES = {
    **{name: getattr(torch.linalg, name) for name in (
        "eig", "eigh", "svd", "qr", "lu", "lu_factor", "ldl_factor", "cholesky", "inv", "pinv",
    )},
    "svd of old": torch.svd, "thin svd": lambda x: torch.linalg.svd(x, full_matrices=False),
    "solve": lambda x: torch.linalg.solve(x, x), "triangular": torch.linalg.matrix_exp,
    "spectrum": torch.fft.rfftn, "back": lambda x: torch.fft.irfft(x, dim=0),
    "spectrum of rows": lambda x: torch.fft.fft(x, dim=-2),
    "right": lambda x: torch.linalg.solve(x, x, left=False), "geqrf": torch.geqrf,
}


@pytest.mark.parametrize("name", _MATRICES)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
def test_matrices_lie_as_torch_lays_them(name: str, batch: tuple[int, ...]) -> None:
    x = torch.rand(*batch, 5, 5, dtype=torch.float64)
    x = x @ x.mT + torch.eye(5)
    function = _MATRICES[name]

    def strides(x: torch.Tensor) -> list[tuple[int, ...]]:
        with torch.no_grad():
            out = function(x)
        return [one.stride() for one in ([out] if isinstance(out, torch.Tensor) else out)]

    for spec in (P("x"), P()):
        found = weft.testing.run(
            lambda mesh, spec=spec: strides(
                weft.distribute_tensor(x, mesh, spec, src_data_rank=None)), mesh={"x": 2},
        )
        assert found == [strides(x)] * 2


def test_statistics_have_the_dtype_that_the_device_gives_them() -> None:
    x = torch.rand(5, 3, dtype=torch.bfloat16)

    def dtypes(x: torch.Tensor) -> list[torch.dtype]:
        return [one.dtype for one in torch.native_layer_norm(x, [3], None, None, 1e-5)]

    assert weft.testing.run(
        lambda mesh: dtypes(weft.distribute_tensor(x, mesh, P("x"), src_data_rank=None)),
        mesh={"x": 2},
    ) == [dtypes(x)] * 2


def elementwise() -> Iterator[tuple[Any, torch.dtype, int]]:
    """All overloads that torch tags as pointwise, and a few more, with a dtype that they take and
    how many tensors they do."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("aten::")]
    for name in sorted(names):
        base, _, overload = name.partition(".")
        found = getattr(getattr(aten, base), overload or "default", None)
        if found is None or any(one.alias_info for one in found._schema.returns) or (
            torch.Tag.pointwise not in found.tags and base not in (
                "floor_divide", "divide", "complex", "polar", "special_xlogy", "rrelu",
                "log_sigmoid", "absolute", "multiply", "greater", "arctan2",
            )
        ):
            continue
        count = [str(one.type) for one in found._schema.arguments].count("Tensor")
        for dtype in (torch.float64, torch.int64, torch.bool):
            try:
                found(*_arguments(found, [torch.ones(2, 3, dtype=dtype)] * count))
            except (RuntimeError, TypeError):
                continue
            if count and base != "equal":
                yield found, dtype, count
            break


def _arguments(overload: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """Of the positional ones that have no default."""
    rest = iter(tensors)
    numbers = {"number": 0.5, "float": 0.5, "int": 1, "bool": True, "Optional[str]": "floor"}
    return [
        next(rest) if str(one.type) == "Tensor" else numbers[str(one.type)]
        for one in overload._schema.arguments
        if not one.kwarg_only and not one.has_default_value() and (
            str(one.type) == "Tensor" or str(one.type) in numbers)
    ]


_SHAPES = [
    ((4, 3, 5), (4, 3, 5)), ((4, 1, 5), (4, 3, 5)), ((5,), (4, 3, 5)), ((3, 5), (4, 3, 5)),
    ((4, 3, 1), (1, 3, 5)), ((4, 4, 2), (4, 1, 2)), ((3, 1, 5), (1, 4, 5)), ((4, 3, 5), ()),
    ((2, 3, 4, 5), (2, 3, 1, 1)), ((1, 4, 1), (4, 1, 1)), ((3, 0, 2), (3, 1, 2)),
]


def _laid(shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> torch.Tensor:
    """Its dims in memory in some order, some of them perhaps expanded."""
    dims = draw.sample(range(len(shape)), len(shape))
    expanded = draw.random() < 0.2
    lengths = [1 if expanded and draw.random() < 0.5 else shape[dim] for dim in dims]
    made = torch.ones(lengths, dtype=dtype).permute([dims.index(dim) for dim in range(len(shape))])
    return made.expand(shape)


def test_elementwise_results_lie_as_kernels_lay_them() -> None:
    draw, wrong, count = random.Random(0), [], 0
    for overload, dtype, num in elementwise():
        for pair, _ in itertools.product(_SHAPES, range(4)):
            shapes = [*draw.sample(pair, 2), draw.choice(pair)]
            tensors = [_laid(shape, dtype, draw) for shape in shapes[:num]]
            due = pytree.tree_leaves(overload(*_arguments(overload, tensors)))
            metas = [torch.empty_strided(one.shape, one.stride(), dtype=dtype, device="meta")
                     for one in tensors]
            trace = capture(overload, _arguments(overload, metas), {}, metas)
            found = [trace.metas[slot.index] for slot in pytree.tree_leaves(trace.result)]
            assert [one.shape for one in found] == [one.shape for one in due]
            count += 1
            if [order(one.stride(), one.shape) for one in found] != [
                order(one.stride(), one.shape) for one in due
            ]:
                wrong.append((str(overload), [(one.shape, one.stride()) for one in tensors]))
    assert not wrong
    assert count > 9000


_TURNED: dict[str, Callable[..., torch.Tensor]] = {
    "heaviside": torch.heaviside, "logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or, "xlogy": torch.xlogy,
    "logical_xor": torch.logical_xor, "special.xlog1py": torch.special.xlog1py,
    "divide": lambda x, y: torch.divide(x, y, rounding_mode="floor"),
    "complex": lambda x, y: torch.complex(x.expand(y.shape), y), "power": lambda x, y: 2.0**y,
    "one_hot": lambda x, y: functional.one_hot((y > 0).long(), 3),
    "isin": lambda x, y: torch.isin(y, x), "logsigmoid": lambda x, y: functional.logsigmoid(y),
    "rrelu": lambda x, y: functional.rrelu(y), "special.xlogy": torch.special.xlogy,
    "float_power": lambda x, y: torch.float_power(2.0, y), "hypot": torch.hypot,
    "angle": lambda x, y: torch.angle(y), "angle of complex": lambda x, y: torch.angle(y + 1j),
    "training rrelu": lambda x, y: functional.rrelu(y, 0.2, 0.2, training=True),
}


@pytest.mark.parametrize("name", _TURNED)
def test_results_of_turned_operands_lie_as_torch_lays_them(name: str) -> None:
    y = torch.rand(5, 3, 4, dtype=torch.float64).permute(1, 2, 0)
    x = torch.rand(3, 1, 5, dtype=torch.float64)
    function = _TURNED[name]
    for one, other in ((x, y), (x.mT.contiguous().mT, y), (y, y.mT.contiguous().mT)):
        due = function(one, other)

        def run(mesh: Any, one: torch.Tensor = one, other: torch.Tensor = other) -> Any:
            layouts = [Layout(mesh, tuple(it.shape), P("x")) for it in (one, other)]
            out = function(*[
                ShardTensor.from_local(
                    local_part(layout, it, mesh.here, 0), mesh, layout, stride=it.stride())
                for layout, it in zip(layouts, (one, other))
            ])
            return order(out.stride(), out.shape), out.full_tensor()  # type: ignore[attr-defined]

        for strides, full in weft.testing.run(run, mesh={"x": 2}):
            assert strides == order(due.stride(), due.shape)
            torch.testing.assert_close(full, due)


_OF_IMAGES: dict[str, Callable[..., torch.Tensor]] = {
    "conv": lambda x, w: (functional.conv2d if x.ndim == 4 else functional.conv3d)(x, w),
    "conv in groups": lambda x, w: (functional.conv2d if x.ndim == 4 else functional.conv3d)(
        x, w[:, :1], groups=6),
    "conv_transpose": lambda x, w: (
        functional.conv_transpose2d if x.ndim == 4 else functional.conv_transpose3d)(x, w),
    "group_norm": lambda x, w: functional.group_norm(x, 3),
    "batch_norm": lambda x, w: functional.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x, w: functional.instance_norm(x),
    "pad": lambda x, w: functional.pad(x, (1, 1) * (x.ndim - 2)),
    "reflect": lambda x, w: functional.pad(x, (1, 1) * (x.ndim - 2), mode="reflect"),
    "replicate": lambda x, w: functional.pad(x, (1, 1) * (x.ndim - 2), mode="replicate"),
    "roll": lambda x, w: torch.roll(x, (1, 2), (0, 2)), "roll all": lambda x, w: torch.roll(x, 2),
    "fftshift": lambda x, w: torch.fft.fftshift(x),
    "channel_shuffle": lambda x, w: functional.channel_shuffle(x, 3),
    "pool": lambda x, w: (functional.max_pool2d if x.ndim == 4 else functional.max_pool3d)(x, 2),
    "nearest": lambda x, w: functional.interpolate(x, scale_factor=2),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "heaviside": lambda x, w: torch.heaviside(x[:, :1], x),
    "pixel_shuffle": lambda x, w: functional.pixel_shuffle(  # torch takes no channels_last_3d
        torch.cat([x if x.ndim == 4 else x.contiguous()] * 4, -3), 2),
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (2, 6, 3, 4, 5)])
@pytest.mark.parametrize("name", _OF_IMAGES)
def test_images_with_channels_last_lie_as_torch_lays_them(
    name: str, shape: tuple[int, ...], spec: P
) -> None:
    if name == "group_norm" and torch.__version__ >= "2.14":
        pytest.skip("this torch keeps channels last there, where weft lays rows")
    function = _OF_IMAGES[name]
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x, w = torch.rand(shape).to(memory_format=last), torch.rand(6, 6, *[2] * (len(shape) - 2))
    due = function(x, w)

    def run(mesh: Any) -> Any:
        layout = Layout(mesh, shape, spec)
        sharded = ShardTensor.from_local(
            local_part(layout, x, mesh.here, 0), mesh, layout, stride=x.stride())
        out = function(sharded, w)
        return order(out.stride(), out.shape), out.full_tensor()

    for strides, full in weft.testing.run(run, mesh={"x": 2}):
        assert strides == order(due.stride(), due.shape)
        torch.testing.assert_close(full, due)


@pytest.mark.parametrize("first, num", [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (0, 3)])
def test_what_a_mask_selects_lies_as_torch_lays_it(first: int, num: int) -> None:
    lengths = (5, 6, 7)
    mask = torch.rand(lengths[first : first + num]) > 0.4
    at = (*[slice(None)] * first, mask)
    for dims in itertools.permutations(range(3)):
        x = torch.rand([lengths[dim] for dim in dims]).permute([dims.index(d) for d in range(3)])
        due = x[at]

        def run(mesh: Any, x: torch.Tensor = x) -> Any:
            layout = Layout(mesh, lengths, P("x"))
            out = ShardTensor.from_local(
                local_part(layout, x, mesh.here, 0), mesh, layout, stride=x.stride())[at]
            return order(out.stride(), out.shape), out.full_tensor()

        for strides, full in weft.testing.run(run, mesh={"x": 2}):
            assert strides == order(due.stride(), due.shape)
            assert torch.equal(full, due)


def test_a_tensor_of_given_strides_is_as_contiguous_as_those() -> None:
    for x in (torch.rand(6, 5, 7).permute(1, 0, 2),
              torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)):

        def run(mesh: Any, x: torch.Tensor = x) -> Any:
            layout = Layout(mesh, tuple(x.shape), P("x"))
            given = ShardTensor.from_local(
                local_part(layout, x, mesh.here, 0), mesh, layout, stride=x.stride())
            return [(one.stride(), one.is_contiguous(), one.dim_order(), one.contiguous().stride())
                    for one in (given, given * 2, given.transpose(0, 1))]

        due = [(one.stride(), one.is_contiguous(), one.dim_order(), one.contiguous().stride())
               for one in (x, x * 2, x.transpose(0, 1))]
        assert weft.testing.run(run, mesh={"x": 2}) == [due] * 2


@ranks(x=2)
def test_an_order_of_dims_that_is_ambiguous_raises_if_asked(mesh: Any) -> None:
    x = weft.ones(4, 6, mesh=mesh, spec=P("x"))
    assert x.dim_order(ambiguity_check=True) == (0, 1)
    with pytest.raises(RuntimeError, match="does not have unique dim order"):
        x[:, None].dim_order(ambiguity_check=True)


@ranks(x=2)
def test_factors_of_matrices_without_elements_lie_as_on_the_device(mesh: Any) -> None:
    x = torch.zeros(3, 0, 5)
    given = weft.distribute_tensor(x, mesh, P("x"), src_data_rank=None)
    for mine, plain in zip(torch.linalg.svd(given), torch.linalg.svd(x)):
        assert mine.stride() == plain.stride()
