"""What is global in a process is each simulated rank's own, and the caller's is left alone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize

import weft
from weft import ShardTypeError
from weft.comm import global_state, random_states, run_simulated


def set_deterministic(rank: int) -> None:
    torch.use_deterministic_algorithms(rank > 0, warn_only=rank > 1)


def deterministic() -> Any:
    return (torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled())


def set_precision(rank: int) -> None:
    torch.set_float32_matmul_precision(("highest", "high", "medium")[rank])


def set_anomaly(rank: int) -> None:
    torch.set_anomaly_enabled(rank > 0, rank > 1)


def anomaly() -> Any:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def set_filters(rank: int) -> None:
    warnings.filters = [*warnings.filters, ("ignore", None, Warning, None, rank)]  # type: ignore


STATES: dict[str, tuple[Callable[[int], object], Callable[[], object]]] = {
    "default dtype": (
        lambda rank: torch.set_default_dtype((torch.float16, torch.float32, torch.float64)[rank]),
        torch.get_default_dtype),
    "deterministic": (set_deterministic, deterministic),
    "precision": (set_precision, torch.get_float32_matmul_precision),
    "anomaly": (set_anomaly, anomaly),
    "kernels of attention": (
        lambda rank: torch.backends.cuda.enable_flash_sdp(rank != 1),
        torch.backends.cuda.flash_sdp_enabled),
    "num_threads": (lambda rank: torch.set_num_threads(rank + 1), torch.get_num_threads),
    "checkpoints": (
        lambda rank: setattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", rank > 1),
        lambda: torch.utils.checkpoint._enable_checkpoint_early_stop),
    "grad mode": (lambda rank: torch.set_grad_enabled(rank != 1), torch.is_grad_enabled),
    "autocast": (
        lambda rank: torch.set_autocast_enabled("cpu", rank != 1),
        lambda: torch.is_autocast_enabled("cpu")),
    "default device": (
        lambda rank: torch.set_default_device(("cpu", "meta", "cpu")[rank]),
        lambda: str(torch.get_default_device())),
    "torch's generator": (torch.manual_seed, lambda: torch.get_rng_state().tolist()),
    "Python's generator": (random.seed, random.getstate),
    "numpy's generator": (np.random.seed, lambda: np.random.get_state()[1].tolist()),  # type: ignore
    "warnings": (set_filters, lambda: warnings.filters[-1]),
}


@pytest.mark.parametrize("name", STATES)
def test_state_is_the_rank_s_own(name: str) -> None:
    change, read = STATES[name]
    before = read()

    def fn(mesh: Any) -> bool:
        at_first = read()
        change(mesh.rank)
        mine = read()
        for _ in range(3):
            mesh.comm((0,)).exchange(None)
            if read() != mine:
                return False
        return at_first == before

    assert run_simulated(fn, 3) == [True] * 3
    assert read() == before
    assert run_simulated(fn, 3) == [True] * 3  # the run before left nothing behind


@pytest.mark.parametrize("name", STATES)
def test_state_is_restored_after_a_failure(name: str) -> None:
    change, read = STATES[name]
    before = read()

    def fn(mesh: Any) -> None:
        change(mesh.rank)
        mesh.comm((0,)).exchange(None)
        raise KeyError(mesh.rank)

    with pytest.raises(KeyError):
        run_simulated(fn, 3)
    assert read() == before


def test_ranks_that_seed_alike_draw_alike() -> None:
    """As processes would, though they take turns between the draws."""
    def fn(mesh: Any) -> list[float]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        drawn = []
        for _ in range(4):
            drawn += [random.random(), np.random.rand(), torch.rand(()).item()]
            mesh.comm((0,)).exchange(None)
        return drawn

    first, *others = run_simulated(fn, 4)
    assert others == [first] * 3 and len(set(first)) == 12


def test_weights_that_parametrize_keeps_are_the_rank_s_own() -> None:
    """Also those of one module that all ranks have; ranks leave `cached` at different times."""
    class OfThisRank(torch.nn.Module):
        rank = threading.local()

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.rank.calls += 1
            return weight + self.rank.number

    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.zero_()
    parametrize.register_parametrization(module, "weight", OfThisRank(), unsafe=True)

    def fn(mesh: Any) -> list[Any]:
        OfThisRank.rank.number, OfThisRank.rank.calls = mesh.rank, 0
        seen = []
        for _ in range(2):
            with parametrize.cached():
                for _ in range(3):
                    seen.append(module.weight[0, 0].item())
                    mesh.comm((0,)).exchange(None)
            seen.append(OfThisRank.rank.calls)
        return seen

    assert run_simulated(fn, 3) == [[rank] * 3 + [1] + [rank] * 3 + [2] for rank in range(3)]


DRAWS: dict[str, dict[str, Callable[[], object]]] = {
    "Python's": {
        "seed": lambda: random.seed(random.random()),
        "state": random.getstate,
        "one number": random.random,
        "the other of a pair": lambda: random.gauss(0, 1),  # which leaves the words as they are
        "many": lambda: [random.random() for _ in range(700)],
        "bytes": lambda: random.randbytes(5),
        "the same again": lambda: random.setstate(random.getstate()),
    },
    "numpy's": {
        "seed": lambda: np.random.seed(np.random.randint(1000)),
        "state": lambda: str(np.random.get_state(legacy=True)),
        "one number": np.random.rand,
        "the other of a pair": np.random.randn,
        "many": lambda: np.random.rand(700).tolist(),
        "as many as the words": lambda: np.random.rand(312).tolist(),
        "bytes": lambda: np.random.bytes(5),
        "the same again": lambda: np.random.set_state(np.random.get_state()),
    },
}


@pytest.mark.parametrize("whose", DRAWS)
def test_every_use_of_a_global_generator_is_the_rank_s_own(whose: str) -> None:
    draws, seed = DRAWS[whose], {"Python's": random.seed, "numpy's": np.random.seed}[whose]

    def fn(mesh: Any) -> list[Any]:
        seed(mesh.rank)
        seen = []
        for name in ("one number", "the other of a pair", *draws, *draws):
            seen.append(draws[name]())
            for _ in range(2):
                mesh.comm((0,)).exchange(None)
            seen.append(draws["state"]())
        return seen

    for rank, found in enumerate(run_simulated(fn, 3)):
        alone = run_simulated(lambda mesh, rank=rank: _as_rank(fn, mesh, rank), 1)[0]
        assert found == alone


def _as_rank(fn: Callable[[Any], Any], mesh: Any, rank: int) -> Any:
    """What a rank does, with nobody else there."""
    class Alone:
        def comm(self, axes: Any) -> Any:
            return mesh.comm(axes)

    alone: Any = Alone()
    alone.rank = rank
    return fn(alone)


def test_global_generators_are_looked_at_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that draw nothing pay for no copy, which takes several times what a switch does."""
    copies: dict[str, int] = {}
    for name in ("PYTHONS", "NUMPYS"):
        generator, copies[name] = getattr(random_states, name), 0
        assert generator.look is not None

        def get(name: str = name, generator: Any = generator) -> Any:
            copies[name] += 1
            return generator.get()

        monkeypatch.setattr(global_state, name, generator._replace(get=get))

    def fn(mesh: Any) -> None:
        for step in range(20):
            mesh.comm((0,)).exchange(None)
            if step == 10 and mesh.rank == 1:
                random.random()
                np.random.rand()

    run_simulated(fn, 4)
    assert copies == {"PYTHONS": 2, "NUMPYS": 2}  # at first, and of the rank that has drawn


def test_without_the_look_states_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, whose in (("PYTHONS", "Python's"), ("NUMPYS", "numpy's")):
        generator = getattr(random_states, name)._replace(look=None)
        monkeypatch.setattr(global_state, name, generator)
        test_every_use_of_a_global_generator_is_the_rank_s_own(whose)


def test_other_bits_of_numpy_s_generator_are_copied() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.MT19937(5))  # type: ignore[attr-defined]
    try:
        test_every_use_of_a_global_generator_is_the_rank_s_own("numpy's")
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_warnings_are_caught_by_the_rank_that_gives_them() -> None:
    def fn(mesh: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mesh.comm((0,)).exchange(None)
            warnings.warn(f"of rank {mesh.rank}", stacklevel=1)
            mesh.comm((0,)).exchange(None)
        mesh.comm((0,)).exchange(None)
        return [str(one.message) for one in caught]

    before = list(warnings.filters)
    assert run_simulated(fn, 3) == [[f"of rank {rank}"] for rank in range(3)]
    assert warnings.filters == before


def test_inside_a_running_event_loop() -> None:
    """As in a notebook: no signals, no loop of its own."""
    async def cell() -> list[int]:
        await asyncio.sleep(0)
        return weft.testing.run(
            lambda mesh: mesh.comm((0,)).exchange(mesh.rank)[1], 3  # type: ignore
        )

    assert asyncio.run(cell()) == [1] * 3


def test_in_a_thread_that_is_not_the_main_one() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(
        weft.testing.run(lambda mesh: mesh.comm((0,)).exchange(mesh.rank), 2)))
    thread.start()
    thread.join()
    assert found == [[0, 1], [0, 1]]


def test_coroutines_are_refused() -> None:
    async def program(mesh: Any) -> None: ...

    with pytest.raises(ShardTypeError) as caught:
        weft.testing.run(program, 2)
    assert str(caught.value) == (
        "run(fn): program is a coroutine function: a call of it only makes a coroutine, which "
        "nobody awaits.\n"
        "  Rule: fn is an ordinary function: ranks are threads, with or without an event loop "
        "around the run.\n"
        "  Offenders: program\n"
        "  Fix: run(lambda mesh: asyncio.run(fn(mesh)))"
    )
    assert weft.testing.run(lambda mesh: asyncio.run(_one()), 2) == [1, 1]


async def _one() -> int:
    return 1


def test_a_small_run_takes_milliseconds() -> None:
    """Far above what it takes on an idle machine (0.1 ms a rank, 0.03 ms a switch)."""
    def fn(mesh: Any) -> None:
        for _ in range(10):
            mesh.comm((0,)).exchange(None)

    times = []
    for _ in range(5):
        start = time.process_time()
        run_simulated(fn, 4)
        times.append(time.process_time() - start)
    assert min(times) < 0.02
