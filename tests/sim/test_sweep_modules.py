"""The sweep over torch's modules: a fixed sample of it, and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.sweep.judge import Dense, dense, judge
from tests.sweep.modules import drawn, modules, samples_of
from tests.sweep.more_modules import MORE
from tests.sweep.runner import expected_of
from tests.sweep.samples import LeftOut, Sample
from tests.sweep.ways import ways_of

SOME = {
    "nn.BatchNorm2d.batch": "train", "nn.GroupNorm.batch": "eval", "nn.LSTM.batch": "no_grad",
    "nn.Dropout2d": "train", "nn.MultiheadAttention.padded": "train", "nn.Conv2d.batch": "eval",
    "nn.TransformerEncoder.batch": "no_grad", "nn.NLLLoss": "train", "nn.PReLU": "eval",
}


def verdict(sample: Sample, expected: Dense, way: str = "batch") -> str:
    found = judge(sample, expected, way, "planted")
    assert found is not None
    return found.kind


@pytest.fixture(scope="module")
def norm() -> Sample:
    return next(samples_of("nn.BatchNorm2d.batch", torch.float64, 1, "train"))


def test_a_sample_has_inputs_parameters_and_buffers(norm: Sample) -> None:
    assert norm.roles == ("input", *["parameter"] * 2, *["buffer"] * 3)
    assert norm.wants_grad == (True, True, True, False, False, False)
    expected = dense(norm)
    assert expected is not None and len(expected.results) == 4
    assert verdict(norm, expected) == "right"
    assert not torch.equal(expected.results[1], norm.tensors[3])  # the running mean has run


def test_it_finds_wrong_results_gradients_and_buffers(norm: Sample) -> None:
    expected = dense(norm)
    assert expected is not None
    for place in range(4):
        wrong = list(expected.results)
        wrong[place] = wrong[place] + 1
        assert verdict(norm, dataclasses.replace(expected, results=wrong)) == "wrong"
    wrong = [None if one is None else one * 2 for one in expected.gradients]
    assert verdict(norm, dataclasses.replace(expected, gradients=wrong)) == "wrong"


def test_it_finds_statistics_of_a_shard(norm: Sample) -> None:
    """What a module without weft's statistics would do: normalise each rank's own samples."""
    expected = dense(norm)
    assert expected is not None

    def local(own: list[Any]) -> Any:
        x, *others = own
        if type(x) is torch.Tensor:
            return norm.fn(own)
        mine = F.batch_norm(x.to_local(), None, None, *others[:2], training=True, eps=1e-5)
        return type(x).from_local(mine, x.device_mesh, x.sharding), *others[2:]

    assert verdict(dataclasses.replace(norm, fn=local), expected) == "wrong"


def test_what_draws_is_compared_with_one_rank() -> None:
    sample = next(samples_of("nn.Dropout", torch.float64, 1, "train"))
    with pytest.raises(LeftOut, match="draws random numbers"):
        dense(sample)
    expected = drawn(sample)
    assert expected is not None and 0 < int((expected.results[0] == 0).sum()) < 30
    assert verdict(sample, expected) == "right"
    wrong = [expected.results[0].flip(0)]
    assert verdict(sample, dataclasses.replace(expected, results=wrong)) == "wrong"


def test_every_layer_of_torch_is_swept() -> None:
    """All exported modules but abstract ones, those of no layer, and what is refused as input."""
    swept = {name.split(".")[1] for name in modules()}
    layers = {
        name for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and not name.startswith("_")
    }
    assert layers - swept == {
        "Module", "Container", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList",
        "RNNBase", "RNNCellBase", "NLLLoss2d", "CrossMapLRN2d", "LazyBatchNorm1d",
        "LazyBatchNorm2d", "LazyBatchNorm3d", "LazyInstanceNorm1d", "LazyInstanceNorm2d",
        "LazyInstanceNorm3d", "LazyLinear", "DataParallel",
    }
    assert {f"nn.{name}" for name in MORE} < set(modules())


@pytest.mark.parametrize("name", SOME)
@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
def test_a_fixed_sample(name: str) -> None:
    for sample in samples_of(name, torch.float64, 1, SOME[name]):
        expected = expected_of(sample)
        for way in ways_of(sample.roles):
            found = judge(sample, expected, way, f"{name} {sample.name} {way}")
            assert found is None or found.kind in ("right", "gathered"), found
