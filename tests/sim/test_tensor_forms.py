"""Forms of results that are told without torch's meta kernels are those that torch finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weft
from weft import P
from weft.tensor.trace.forms import known_form

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
        told, found = known_form(overload, args, {}), overload(*args)
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
        told, found = known_form(overload, args, options), overload(*real, **options)
        assert told is not None
        assert (told.shape, told.dtype, told.stride()) == (found.shape, found.dtype, found.stride())


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
    assert known_form(aten.cross_entropy_loss.default, args, {}) is None


@torch.no_grad()
@pytest.mark.parametrize("args", [
    (_meta(2, 5, 4), _meta(2, 6, 3), _meta(2, 6, 4)),
    (_meta(2, 5, 4), _meta(2, 6, 4), _meta(2, 5, 4)),
    (_meta(2, 5, 4), _meta(1, 6, 4), _meta(2, 6, 4)),
    (_meta(2, 5, 4), _meta(2, 6, 4), _meta(2, 6, 4, dtype=torch.float64)),
    (_meta(2, 5, 4), _meta(2, 6, 4), _meta(2, 6, 4), _meta(5, 6)),
    (_meta(2, 5, 4), _meta(2, 6, 4), _meta(2, 6, 4), None, 0.5),
])
def test_attention_that_may_be_wrong_is_left_to_torch(args: Any) -> None:
    assert known_form(aten.scaled_dot_product_attention.default, args, {}) is None


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
