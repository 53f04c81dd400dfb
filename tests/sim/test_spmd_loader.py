"""ShardedLoader: batches are those of the loader on one process; a rank loads its samples alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import weft
from tests.harness import ranks
from weft import LayoutError, MeshError, P, PlacementError, ShardTensor, ShardTypeError
from weft.spmd import ShardedLoader, ShardingSpec

MESH = {"dp": 3, "tp": 2}
X = torch.arange(22.0 * 5).view(22, 5)
Y = torch.arange(22)


class Samples(Dataset):
    """Counts what is loaded; of 22 samples, as dicts or pairs."""

    def __init__(self, as_dict: bool = False) -> None:
        self.loaded: list[int] = []
        self.as_dict = as_dict

    def __len__(self) -> int:
        return 22

    def __getitem__(self, at: int) -> Any:
        self.loaded.append(at)
        return {"x": X[at], "y": Y[at]} if self.as_dict else (X[at], Y[at])


def whole(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: whole(one) for key, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [whole(one) for one in batch]
    return batch.full_tensor() if isinstance(batch, ShardTensor) else batch


@pytest.mark.parametrize("spec", [
    P("dp"), ("dp",), [P("dp", "tp"), P("dp")], [P("dp"), P()], [P("dp"), None], P(("dp", "tp")),
    P(),
], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_those_of_one_process(spec: Any, shuffle: bool) -> None:
    def loader(dataset: Any) -> DataLoader:
        order = torch.Generator().manual_seed(3)
        return DataLoader(dataset, batch_size=8, shuffle=shuffle, generator=order)

    def on_rank(mesh: Any) -> list[Any]:
        sharded = ShardedLoader(loader(Samples()), spec, mesh=mesh)
        assert len(sharded) == 3
        out = []
        for _ in range(2):
            batches = list(sharded)
            assert all(isinstance(one[0], ShardTensor) for one in batches)
            out.append([whole(batch)[0] for batch in batches])
        return out

    once = loader(Samples())
    expected = [[x for x, _ in once] for epoch in range(2)]
    for found in weft.testing.run(on_rank, mesh=MESH):
        torch.testing.assert_close(found, expected)


def test_a_rank_loads_its_samples_alone_and_the_last_batch_is_ragged() -> None:
    def on_rank(mesh: Any) -> tuple[list[int], list[str]]:
        data = Samples()
        specs = [ShardingSpec(mesh, ("dp", "tp")), ShardingSpec(mesh, ("dp",))]
        batches = list(ShardedLoader(DataLoader(data, batch_size=10), specs))
        return data.loaded, [str(x.sharding) for x, _ in batches]

    seen = weft.testing.run(on_rank, mesh=MESH)
    assert {tuple(layouts) for _, layouts in seen} == {
        ("[10@dp, 5@tp]", "[10@dp, 5@tp]", "[2@dp, 5@tp]")
    }
    # 4, 4, 2 of ten; 1, 1, 0 of the last two: the rank without a sample loads one to see its form.
    assert [loaded for loaded, _ in seen][::2] == [
        [0, 1, 2, 3, 10, 11, 12, 13, 20], [4, 5, 6, 7, 14, 15, 16, 17, 21],
        [8, 9, 18, 19, 20],
    ]


class OtherSizes:
    """A batch sampler that cuts its 22 samples elsewhere in each iteration."""

    def __init__(self) -> None:
        self.cuts = iter([(0, 8, 10, 22), (0, 3, 12, 22)])

    def __iter__(self) -> Any:
        return (list(range(*cut)) for cut in pairwise(next(self.cuts)))


def test_two_iterations_at_once() -> None:
    def on_rank(mesh: Any) -> list[Any]:
        loader = DataLoader(Samples(), batch_sampler=OtherSizes())  # type: ignore[arg-type]
        sharded = ShardedLoader(loader, P("dp"), mesh=mesh)
        first, second = iter(sharded), iter(sharded)
        return [whole(next(one))[1] for one in (first, second, first, first, second, second)]

    expected = [range(0, 8), range(0, 3), range(8, 10), range(10, 22), range(3, 12), range(12, 22)]
    for found in weft.testing.run(on_rank, mesh=MESH):
        assert [one.tolist() for one in found] == [list(one) for one in expected]


def test_dict_batches_and_training() -> None:
    def on_rank(mesh: Any) -> Tensor:
        sharded = ShardedLoader(
            DataLoader(Samples(as_dict=True), batch_size=9),
            {"x": P("dp"), "y": P("dp")}, mesh=mesh, device="cpu")
        w = torch.ones(5).requires_grad_()
        for batch in sharded:
            ((batch["x"] @ w - batch["y"]) ** 2).sum().backward()
        assert w.grad is not None
        return w.grad

    w = torch.ones(5).requires_grad_()
    ((X @ w - Y) ** 2).sum().backward()
    for grad in weft.testing.run(on_rank, mesh=MESH):
        torch.testing.assert_close(grad, w.grad)


def test_minibatches_are_each_rank_s_own() -> None:
    def on_rank(mesh: Any) -> tuple[str, Tensor]:
        at = mesh.rank // 2
        mine = TensorDataset(X[at * 3 : at * 3 + 3 - at])
        loader = ShardedLoader(
            DataLoader(mine, batch_size=4), ShardingSpec(mesh, ("dp", "tp"), minibatch=True))
        ((x,),) = list(loader)
        return str(x.sharding), x.full_tensor()

    for layout, found in weft.testing.run(on_rank, mesh=MESH):
        assert layout == "[6@dp{3,2,1}, 5@tp]"
        torch.testing.assert_close(found, X[[0, 1, 2, 3, 4, 6]])


def test_a_stream_is_loaded_by_all() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(X)

    def on_rank(mesh: Any) -> list[Tensor]:
        return [x.full_tensor() for x in ShardedLoader(
            DataLoader(Stream(), batch_size=8), P("dp"), mesh=mesh)]

    for found in weft.testing.run(on_rank, mesh=MESH):
        torch.testing.assert_close(found, list(X.split(8)))


@ranks(**MESH)
def test_spec_applies(mesh: Any) -> None:
    shapes = [(), (2,), (2, 3), (2, 3, 4), (2, 3, 4, 5)]
    for spec in (("dp", None, "tp"), ("dp", "tp", None), (None, None, None)):
        able = [ShardingSpec(mesh, spec).can_apply(torch.zeros(shape)) for shape in shapes]
        assert able == [False, False, False, True, False]
    able = [ShardingSpec(mesh, P("dp", "tp")).can_apply(torch.zeros(shape)) for shape in shapes]
    assert able == [False, False, True, True, True]  # a P leaves dims out
    for minibatch in (False, True):
        spec = ShardingSpec(mesh, ("dp", None), minibatch)
        with pytest.raises(PlacementError, match="has 2 entries, and the tensor 1 dims"):
            spec.apply(X[:, 0])
    assert ShardingSpec(mesh, ("dp",)).apply(X).spec == P("dp")


@pytest.mark.parametrize(("spec", "kind"), [
    (("rows",), MeshError), ((2,), MeshError), (("dp", "dp"), PlacementError),
    (("dp", ("tp", "dp")), PlacementError), ("dp", ShardTypeError), (None, ShardTypeError),
    ((("dp", ("tp",)),), ShardTypeError), ((1.5,), ShardTypeError), (P("rows"), MeshError),
    (P("dp", "dp"), PlacementError),
])
def test_wrong_specs_are_found_in_the_constructor(spec: Any, kind: type[Exception]) -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(kind) as told:
            ShardingSpec(mesh, spec)
        with pytest.raises(kind) as of_value:
            ShardingSpec(mesh.abstract, spec)
        assert str(told.value) == str(of_value.value)
        with pytest.raises(ShardTypeError, match="is no mesh"):
            ShardingSpec("dp", ("dp",))  # type: ignore[arg-type]
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len(set(texts)) == 1 and "Offenders:" in texts[0]


@pytest.mark.parametrize(("spec", "kind", "said"), [
    ({"x": P("dp")}, LayoutError,
     "ShardedLoader(placements=): the batch has the keys ['x', 'y'], the specs ['x']."),
    ({"x": P("dp"), "y": P("dp"), "z": P()}, LayoutError,
     "ShardedLoader(placements=): the batch has the keys ['x', 'y'], the specs ['x', 'y', 'z']."),
    ([P("dp")], LayoutError, "ShardedLoader(placements=): the batch has dict parts"),
    ("dp", ShardTypeError, "ShardedLoader(placements=): 'dp' is a str."),
])
def test_bad_specs(spec: Any, kind: type[Exception], said: str) -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(kind) as told:
            list(ShardedLoader(DataLoader(Samples(as_dict=True), batch_size=9), spec, mesh=mesh))
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len(set(texts)) == 1 and texts[0].startswith(said)


def test_other_orders_and_other_shapes_are_found_on_all_ranks() -> None:
    def on_rank(mesh: Any) -> list[str]:
        order = torch.Generator().manual_seed(mesh.rank)
        said = []
        for loader in (
            DataLoader(Samples(), batch_size=8, shuffle=True, generator=order),
            DataLoader(TensorDataset(X), batch_size=6,
                       collate_fn=lambda one: torch.stack([x[: mesh.rank + 1] for x, in one])),
        ):
            with pytest.raises(LayoutError) as told:
                list(ShardedLoader(loader, P("dp"), mesh=mesh))
            said.append(str(told.value))
        return said

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert all(text == texts[0] for text in texts)
    assert texts[0][0].startswith("ShardedLoader: the ranks draw 6 different first batches.")
    assert texts[0][1].startswith("ShardedLoader: samples have other shapes or dtypes on other")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of one core
@pytest.mark.parametrize("persistent", [False, True])
def test_several_workers_load_the_rank_s_own_samples_and_a_ragged_last_batch(
    persistent: bool,
) -> None:
    """Two epochs, by two workers that load ahead; 22 samples in batches of 8 end with 6."""

    def loader() -> DataLoader:
        order = torch.Generator().manual_seed(3)
        return DataLoader(
            Samples(as_dict=True), batch_size=8, shuffle=True, generator=order, num_workers=2,
            prefetch_factor=2, persistent_workers=persistent, multiprocessing_context="fork")

    def on_rank(mesh: Any) -> tuple[list[str], list[Any]]:
        specs = {"x": P("dp", "tp"), "y": P("dp")}
        sharded = ShardedLoader(loader(), specs, mesh=mesh, device="cpu")
        batches = [batch for _ in range(2) for batch in sharded]
        return [str(batch["x"].sharding) for batch in batches], [whole(one) for one in batches]

    once = loader()
    expected = [batch for _ in range(2) for batch in once]
    for layouts, found in weft.testing.run(on_rank, mesh={"dp": 3, "tp": 1}):
        assert layouts == ["[8@dp, 5@tp]", "[8@dp, 5@tp]", "[6@dp, 5@tp]"] * 2
        torch.testing.assert_close(found, expected)


@ranks(**MESH)
def test_labels_lack_dims_that_the_spec_does_not_shard(mesh: Any) -> None:
    rows = [(row, label) for label, row in enumerate(X)]

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows)

    for minibatch in (False, True):
        for data in (rows, Stream()):
            data: Any
            spec = ShardingSpec(mesh, ("dp", None), minibatch)
            x, labels = next(iter(ShardedLoader(DataLoader(data, 4), spec)))
            assert x.spec == labels.spec == P("dp")
            assert labels.shape == x.shape[:1] == (12 if minibatch else 4,)



@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_minibatches_of_workers_whose_last_is_smaller_on_some_ranks() -> None:
    """Ranks 0 and 1 load 2 + 2 samples, rank 2 loads 2 + 1."""

    def on_rank(mesh: Any) -> list[Any]:
        at = mesh.rank
        rows = torch.arange(4 - at // 2) + 10 * at
        loader = DataLoader(TensorDataset(X[rows % 22], rows), batch_size=2, num_workers=1,
                            multiprocessing_context="fork")
        spec = ShardingSpec(mesh, ("dp",), minibatch=True)
        return [(str(y.sharding), y.tolist()) for _, y in ShardedLoader(loader, spec)]

    for found in weft.testing.run(on_rank, mesh={"dp": 3}):
        assert found == [
            ("[6@dp]", [0, 1, 10, 11, 20, 21]), ("[5@dp]", [2, 3, 12, 13, 22]),
        ]
