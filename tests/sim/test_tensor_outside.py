"""A rank outside the mesh knows of every result what the ranks inside know, but the data."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from tests.cases import Trial, trials
from tests.cases.every import EVERY
from tests.harness import _backward, _want_gradients, allowances, flat, local_part
from weft import MeshError, ShardTensor
from weft.core import Mesh

SAID = [
    next(trial for trial in trials(case) if Mesh(dict(trial.axes)).size() == 2) for case in EVERY
]


def facts(x: Any) -> Any:
    """All that a rank knows of a result without data."""
    if not isinstance(x, ShardTensor):
        return type(x)
    return (str(x.sharding), tuple(x.shape), x.dtype, tuple(x.stride()), x.requires_grad,
            x._meta.requires_grad, x._meta.alias)


def run_trial(trial: Trial, mesh: Any) -> Any:
    operands = []
    for place, (dense, layout) in enumerate(zip(trial.case.tensors(), trial.layouts)):
        if layout is None:
            operands.append(dense)
            continue
        layout = type(layout).make(mesh.abstract, layout.shape, layout.dims, layout.cuts,
                                   layout.partial)
        local = dense.new_empty(0)
        if mesh.here is not None:
            local = local_part(layout, dense, mesh.here, place)
        operands.append(ShardTensor.from_local(local, mesh, layout))
    leaves = _want_gradients(trial.case, operands)
    results = flat(trial.case.fn(*operands))
    _backward(trial.case, results)
    grads = [leaf.grad for leaf in leaves if type(leaf) is ShardTensor]
    for one in (*results, *grads):
        if type(one) is ShardTensor:
            expected = one._meta.local_shape
            assert tuple(one._local.shape) == expected, f"{tuple(one._local.shape)}: {one.sharding}"
    return [facts(one) for one in results], [one is not None and facts(one) for one in grads]


@pytest.mark.parametrize("trial", SAID, ids=lambda trial: trial.case.name)
def test_every_op(trial: Trial) -> None:
    """Or a MeshError where data say what the result is."""
    def on_rank(_: Any) -> Any:
        mesh = weft.init_mesh(Mesh(dict(trial.axes), (2, 1)))
        try:
            return run_trial(trial, mesh)
        except (MeshError, weft.UnsupportedOpError) as error:
            if mesh.here is None or trial.case.may_refuse:
                return type(error)
            raise

    with allowances(trial.case):
        outside, inside, other = weft.testing.run(on_rank, 3, {"w": 3})
    assert inside == other
    assert outside == inside or outside is MeshError
