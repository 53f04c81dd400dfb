"""The generator: Random123's known answers, four bodies that agree, any box as any other way."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from weft.rng import Source, lanes, runs, samples, source
from weft.rng import lanes_in_numpy as ways
from weft.rng.philox import blocks_in_a_row, blocks_of, blocks_on, philox, philox_torch

CPU = torch.device("cpu")
FULL = (1 << 64) - 1

compiled = pytest.mark.skipif(lanes.compiled is None, reason="weft was built without a C compiler")

KNOWN = [  # counter, key, answer: from kat_vectors of Random123, philox4x64 10
    ((0, 0, 0, 0), (0, 0),
     (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    ((FULL,) * 4, (FULL,) * 2,
     (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)),
    ((0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
     (0x452821E638D01377, 0xBE5466CF34E90C6C),
     (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: Any, key: Any, answer: Any) -> None:
    in_numpy = philox(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in in_numpy) == answer
    words = tuple(
        torch.from_numpy(np.array([word], np.uint64).view(np.int64)) for word in counter
    )
    in_torch = philox_torch(words, key)
    assert tuple(int(word[0]) % (1 << 64) for word in in_torch) == answer


@pytest.mark.parametrize("key", [(0, 0), (1, 2), (FULL, FULL), (0x9E3779B97F4A7C15, 1 << 63)])
@pytest.mark.parametrize("sub", [0, 1, 77])
@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 3, 1 << 40])
def test_the_three_bodies_agree(key: Any, sub: int, first: int) -> None:
    blocks = np.arange(first, first + 9)
    row = blocks_in_a_row(key, sub, first, 9).reshape(9, 4)
    assert (row == blocks_of(key, sub, blocks)).all()
    assert (row.view(np.int64) == blocks_on(key, sub, torch.from_numpy(blocks)).numpy()).all()


def test_words_of_every_kind() -> None:
    """Zeros, carries and full words: the two array bodies, which multiply differently."""
    words = np.array([0, 1, (1 << 32) - 1, 1 << 32, 1 << 63, FULL - 1, FULL], np.uint64)
    counter = tuple(each.reshape(-1) for each in np.meshgrid(words, words, words, words))
    in_torch = tuple(torch.from_numpy(word.view(np.int64)) for word in counter)
    for key in ((0, 0), (FULL, 1), (0x9E3779B97F4A7C15, FULL)):
        expected = philox_torch(in_torch, key)
        for one, other in zip(philox(counter, key), expected):
            assert (one.view(np.int64) == other.numpy()).all()


def test_a_block_is_what_random123_says_of_its_counter() -> None:
    counter = tuple(np.array([word], np.uint64) for word in (6 + 1, 3, 0, 0))
    words = np.concatenate(philox(counter, (11, 12)))
    assert (blocks_in_a_row((11, 12), 3, 6, 1) == words).all()


@pytest.mark.parametrize("words", [
    words for num in range(1, 5) for words in itertools.combinations(range(4), num)
])
@pytest.mark.parametrize("same", [(), (1, 2, 3), (0, 2), (1,), (0, 1, 2, 3)])
def test_words_by_themselves(words: Any, same: Any) -> None:
    """Only what they depend on is computed, and what is one number for all of them once."""
    draw = np.random.Generator(np.random.PCG64(0))
    counter: list[Any] = [draw.integers(0, FULL, 5, np.uint64, endpoint=True) for _ in range(4)]
    for place in same:
        counter[place][:] = counter[place][0]
    expected = philox(tuple(counter), (FULL, 7))
    for place in same:
        counter[place] = int(counter[place][0])
    found = philox(tuple(counter), (FULL, 7), words)
    assert len(found) == len(words)
    assert all((one == expected[word]).all() for one, word in zip(found, words))


@pytest.mark.parametrize(("num", "count", "step", "way"), [
    (1 << 16, 1, 8, "_by_span"), (1 << 16, 1, 16, "_by_span"), (1 << 16, 1, 64, "_scattered"),
    (1 << 16, 1, 61, "_scattered"), (1 << 13, 8, 64, "_scattered"), (1 << 13, 8, 16, "_by_span"),
    (12, 1, 64, "_by_span"), (12, 1, 61, "_by_span"), (4, 8, 9999, "_by_run"),
])
def test_the_way_that_is_chosen(
    num: int, count: int, step: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cheapest, as measured: a call of the array body costs what 50,000 lanes in a row do."""
    for name in ("_by_run", "_by_span", "_scattered"):
        monkeypatch.setattr(ways, name, lambda *_, name=name: name)
    assert ways.lanes_in_numpy((1, 2), 0, range(6, 6 + num * step, step), count) == way


def _boxes(num: int) -> list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    draw, out = random.Random(0), []
    for _ in range(num):
        shape = tuple(draw.randint(0, 9) for _ in range(draw.randint(0, 4)))
        box = []
        for length in shape:
            start = draw.randint(0, length)
            whole = draw.random() < 0.4
            box.append((0, length) if whole else (start, draw.randint(start, length)))
        out.append((shape, tuple(box)))
    return out


@pytest.mark.parametrize("name", ["bits32", "bits64", "normal32", "normal64", "integers"])
def test_a_box_is_cut_from_the_whole(name: str) -> None:
    """Whatever the runs, whatever their parity: an element depends on its global index alone."""
    draws: dict[str, Any] = {
        "bits32": Source.bits32, "bits64": Source.bits64,
        "normal32": lambda source: samples.normal(source, torch.float32),
        "normal64": lambda source: samples.normal(source, torch.float64),
        "integers": lambda source: samples.integers(source, 0, 3 << 61, torch.int64),
    }
    draw = draws[name]
    for shape, box in _boxes(150):
        whole = draw(Source.whole((3, 4), shape, CPU))
        part = draw(Source((3, 4), shape, box, CPU))
        assert part.is_contiguous() or part.numel() <= 1 or name.startswith("normal")
        assert torch.equal(part, whole[tuple(slice(*side) for side in box)]), (shape, box)


def test_an_element_has_the_lanes_of_its_index() -> None:
    """Against a loop over elements that calls the function itself."""
    shape, key = (3, 7), (21, 22)
    found = Source.whole(key, shape, CPU).bits32().flatten().tolist()
    for index in range(math.prod(shape)):
        counter = tuple(np.array([word], np.uint64) for word in (index // 8 + 1, 0, 0, 0))
        block = np.concatenate(philox(counter, key)).view(np.int32)
        assert found[index] == block[index % 8]


def test_all_ways_to_the_lanes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    for _ in range(60):
        count, num = draw.randint(1, 40), draw.randint(2, 12)
        first, step = draw.randint(0, 3000), draw.randint(1, 300)
        evenly = range(first, first + num * step, step)
        anyhow = np.sort(np.array([draw.randint(0, 3000) for _ in range(num)]))
        for starts in (evenly, np.array(evenly), anyhow):
            expected = np.stack([ways._row((5, 6), 0, int(start), count) for start in starts])
            for way in (ways._by_run, ways._by_span, ways._scattered):
                assert (way((5, 6), 0, starts, count) == expected).all(), way
            with monkeypatch.context() as patched:
                patched.setattr(ways, "_MANY", 1)  # runs of one offset by themselves
                assert (ways._scattered((5, 6), 0, starts, count) == expected).all()
            found = lanes._on_device((5, 6), 0, np.array(starts), count, CPU)
            assert (found.numpy() == expected).all()


@compiled
@pytest.mark.parametrize("key", [(0, 0), (1, 2), (FULL, FULL), (0x9E3779B97F4A7C15, 1 << 63)])
@pytest.mark.parametrize("sub", [0, 1, FULL])
def test_compiled_lanes(key: Any, sub: int) -> None:
    """Runs within a block and beyond it, that share blocks, in any order, longer than what is
    computed at a time, and more of them."""
    draw = random.Random(2)
    for count, num in [(1, 1), (1, 3000), (3, 700), (7, 40), (8, 300), (9, 9), (200, 30), (2040, 3),
                       (2041, 2), (4080, 2), (9000, 2), (draw.randint(1, 99), 50)]:
        first = draw.choice([0, 5, (1 << 43) - 3 * count])
        for starts in (
            range(first, first + num), range(first, first + num * 5, 5),
            range(first, first + num * (count + 61), count + 61),
            first + np.array([draw.randint(0, 50 * count) for _ in range(num)]),
        ):
            found = lanes.lanes(key, sub, starts, count, CPU)
            places = runs.array_of(starts)[:, None] + np.arange(count)
            least, most = int(places.min()) // 8, int(places.max()) // 8
            words = blocks_in_a_row(key, sub, least, most - least + 1).view(np.int32)
            assert found.shape == (num, count)
            assert (found.numpy() == words[places - 8 * least]).all(), (count, num)


@compiled
def test_compiled_lanes_refuse_what_does_not_fit() -> None:
    fill: Any = lanes.compiled.fill
    starts = np.zeros(2, np.int64)
    for wrong in (np.empty((2, 3), np.int32)[:, :2], np.empty(3, np.int32), np.empty(9, np.uint8)):
        with pytest.raises((ValueError, TypeError)):
            fill(wrong, starts, (0, 0), 0)
    with pytest.raises(ValueError):
        fill(np.empty(4, np.int32), starts[:0], (0, 0), 0)
    with pytest.raises(TypeError):
        fill(np.empty(4, np.int32), starts, (0, 1.5), 0)
    fill(np.empty(0, np.int32), starts, (0, 0), 0)
    fill(np.empty(0, np.int32), starts[:0], (0, 0), 0)


@pytest.mark.parametrize("limit", [1, 2, 5, 16, 64, 1000])
def test_pieces_are_all_runs(limit: int) -> None:
    for shape, box in _boxes(150):
        table = runs.runs_of(shape, box)
        expected = np.arange(math.prod(shape)).reshape(shape)[tuple(slice(*side) for side in box)]
        found = np.full((table.num, table.length), -1)
        assert found.size == expected.size
        for piece in table.pieces(limit):
            part = found[piece.rows, piece.start : piece.stop]
            assert (part == -1).all() and len(part) == len(piece.starts)
            part[...] = np.array(piece.starts)[:, None] + np.arange(piece.stop - piece.start)
        assert (found.reshape(-1) == expected.reshape(-1)).all(), (shape, box)


@pytest.mark.parametrize("chunk", [2, 6, 64])
def test_values_do_not_depend_on_the_pieces(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(part: Source) -> list[torch.Tensor]:
        return [part.bits32(), part.bits64(), samples.normal(part, torch.float32)]

    for shape, box in _boxes(100):
        part = Source((3, 4), shape, box, CPU)
        expected = draws(part)
        with monkeypatch.context() as patched:
            patched.setitem(source._CHUNK_LANES, "cpu", chunk)
            assert all(map(torch.equal, draws(part), expected))


@pytest.mark.parametrize("body", ["torch", "numpy"])
def test_other_bodies_give_the_same_values(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator does, on the CPU; and what a CPU does without the compiled body."""
    def on_device(key: Any, sub: int, starts: Any, count: int, device: Any) -> torch.Tensor:
        return lanes._on_device(key, sub, runs.array_of(starts), count, device)

    def draws(part: Source) -> list[torch.Tensor]:
        return [
            part.bits64(), samples.unit(part, torch.float32), samples.unit(part, torch.bfloat16),
            samples.unit(part, torch.complex128), samples.bernoulli(part, 0.3),
            samples.integers(part, -3, 9, torch.int64), samples.normal(part, torch.float64),
            samples.integers(part, 0, 3 << 61, torch.int64),
            samples.uniform(part, torch.float32, -1.0, 2.0),
        ]

    for shape, box in _boxes(60):
        part = Source((FULL, 4), shape, box, CPU)
        expected = draws(part)
        with monkeypatch.context() as patched:
            if body == "torch":
                patched.setattr(source, "lanes", on_device)
            else:
                patched.setattr(lanes, "compiled", None)
            assert all(map(torch.equal, draws(part), expected))


def test_numbers_stay_what_they_are() -> None:
    """A seed that has been written down means the same in later versions."""
    here = Source.whole((42, 0), (3,), CPU)
    assert here.bits32().tolist() == BITS32
    assert samples.unit(here, torch.float32).tolist() == [
        (bits % (1 << 24)) / (1 << 24) for bits in BITS32
    ]
    assert samples.integers(here, 0, 1000, torch.int64).tolist() == [
        (bits % (1 << 32)) * 1000 >> 32 for bits in BITS32
    ]
    normals = torch.tensor(NORMALS, dtype=torch.float32)
    torch.testing.assert_close(samples.normal(here, torch.float32), normals, rtol=1e-6, atol=1e-6)


BITS32 = [1298302990, -772243075, 1556642174]
NORMALS = [0.84981, -0.467145, 1.09132]
