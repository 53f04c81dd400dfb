"""The benchmark's own arithmetic: medians, ratios, verdicts."""

from __future__ import annotations

from bench.timing import Figure, Times, interleave, once


def test_ratios_and_differences_are_taken_within_rounds() -> None:
    times = Times({"base": [1000.0, 2000.0, 9000.0], "mine": [3000.0, 4000.0, 9000.0]})
    assert times.median("base") == 2.0
    assert times.ratio("mine", "base") == 2.0
    assert times.over("mine", "base") == 2.0


def test_systems_take_turns() -> None:
    seen: list[str] = []

    def system(name: str):
        def run() -> None:
            if not seen or seen[-1] != name:
                seen.append(name)

        return run

    times = interleave({"a": system("a"), "b": system("b")}, 3)
    assert seen == ["a", "b"] * 4  # the warm-up, then three rounds
    assert all(len(times.rounds[name]) == 3 for name in "ab")
    assert once(lambda: sum(range(1000))) > 0


def test_a_figure_is_met_up_to_its_limit() -> None:
    assert Figure("ratio", 1.25, 1.25).is_met
    assert not Figure("ratio", 1.26, 1.25).is_met
