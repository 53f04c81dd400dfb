"""The generator: Random123's known answers, three bodies that agree, any box as any other way."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from weft.rng import Source, lanes, runs, samples, source
from weft.rng.philox import blocks_in_a_row, blocks_on, philox

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


def _by_definition(counter: Any, key: Any) -> tuple[int, ...]:
    """Philox 4x64-10 on Python's integers."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        high0, low0 = divmod(a * 0xD2E7470EE14C6C93, 1 << 64)
        high1, low1 = divmod(c * 0xCA5A826395121157, 1 << 64)
        a, b, c, d = high1 ^ b ^ first, low1, high0 ^ d ^ second, low0
        first, second = (first + 0x9E3779B97F4A7C15) & FULL, (second + 0xBB67AE8584CAA73B) & FULL
    return a, b, c, d


def _of(counters: Any, key: Any) -> list[tuple[int, ...]]:
    """The function itself on several counters."""
    words = np.array(counters, np.uint64).view(np.int64)
    found = torch.stack(philox(tuple(torch.from_numpy(words).unbind(1)), key), 1)
    return [tuple(word % (1 << 64) for word in block) for block in found.tolist()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: Any, key: Any, answer: Any) -> None:
    assert _by_definition(counter, key) == answer
    assert _of([counter], key) == [answer]


@pytest.mark.parametrize("key", [(0, 0), (1, 2), (FULL, FULL), (0x9E3779B97F4A7C15, 1 << 63)])
@pytest.mark.parametrize("sub", [0, 1, 77])
@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 3, 1 << 40])
def test_the_bodies_agree(key: Any, sub: int, first: int) -> None:
    row = blocks_in_a_row(key, sub, first, 9).reshape(9, 4)
    blocks = torch.arange(first, first + 9)
    assert (row.view(np.int64) == blocks_on(key, sub, blocks).numpy()).all()


def test_words_of_every_kind() -> None:
    """Zeros, carries and full words."""
    words = (0, 1, (1 << 32) - 1, 1 << 32, 1 << 63, FULL - 1, FULL)
    counters = random.Random(0).sample([*itertools.product(words, repeat=4)], 300)
    for key in ((0, 0), (FULL, 1), (0x9E3779B97F4A7C15, FULL)):
        assert _of(counters, key) == [_by_definition(counter, key) for counter in counters]


def test_a_block_is_what_random123_says_of_its_counter() -> None:
    (words,) = _of([(6 + 1, 3, 0, 0)], (11, 12))
    assert tuple(blocks_in_a_row((11, 12), 3, 6, 1).tolist()) == words


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
        block = np.array(_of([(index // 8 + 1, 0, 0, 0)], key), np.uint64).reshape(-1)
        assert found[index] == block.view(np.int32)[index % 8]


def test_all_ways_to_the_lanes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    monkeypatch.setattr(lanes, "compiled", None)
    for _ in range(60):
        count, num = draw.randint(1, 40), draw.randint(1, 12)
        starts = np.sort(np.array([draw.randint(0, 3000) for _ in range(num)]))
        firsts = [(int(start) // 8, int(start) % 8) for start in starts]
        expected = np.stack([
            blocks_in_a_row((5, 6), 0, block, 7).view(np.int32)[offset : offset + count]
            for block, offset in firsts
        ])
        for lanes_of_a_row in (1, 100, 1 << 13):
            monkeypatch.setattr(lanes, "_ROW", lanes_of_a_row)
            monkeypatch.setattr(lanes, "_APART", draw.choice([1, 16]))
            assert (lanes.lanes((5, 6), 0, starts, count, CPU).numpy() == expected).all()
        found = lanes._on_device((5, 6), 0, starts, count, CPU)
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
            np.arange(first, first + num), np.arange(first, first + num * 5, 5),
            np.arange(first, first + num * (count + 61), count + 61),
            first + np.array([draw.randint(0, 50 * count) for _ in range(num)]),
        ):
            found = lanes.lanes(key, sub, starts, count, CPU)
            places = starts[:, None] + np.arange(count)
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
            part[...] = piece.starts[:, None] + np.arange(piece.stop - piece.start)
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
                patched.setattr(source, "lanes", lanes._on_device)
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
