"""Steps of a small Llama of transformers, unmodified: beside plain tensors, and of new lengths.

weft's runs data-parallel on rank 0 of the fake world, plain torch what is that rank's share. What
weft takes more is the host's work, the same for a model of any width. Where sequences grow or
differ, one step of a length never seen before is shown, and the same step again: its calls are
known in structure, so that all the new one adds is lengths.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

import weft
from bench import world
from bench.timing import Figure, Row, once, timed

BATCH, LENGTH = 4, 16
WIDTHS = (32, 256)
OF_NEW_LENGTH, OF_GROWING_CACHE = 1.5, 1.2
"""The most that a step of a new length may take, to one of a length that was met."""

_lengths = itertools.count(20)


def llama(width: int) -> Any:
    """Two layers, with grouped heads."""
    import transformers  # noqa: PLC0415  (seconds, which other items should not pay)

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    ))


def tokens(share: Any) -> Any:
    """The whole batch, of which each rank has this share."""
    return weft.distribute_tensor(
        share.repeat(world.NUM_RANKS, 1), world.weft_line(), weft.P("dp"), src_data_rank=None)


def some(length: int) -> Any:
    return torch.randint(0, 512, (BATCH, length))


def step(system: str, width: int) -> Callable[[], Any]:
    """Forward and backward, without an optimizer."""
    model = llama(width)
    given = some(LENGTH)
    if system == "weft":
        weft.distribute_module(model, world.weft_line())
        given = tokens(given)

    def run() -> None:
        model(input_ids=given, labels=given).loss.backward()
        for each in model.parameters():
            each.grad = None

    return run


def measure(num_rounds: int) -> list[Row]:
    return [
        timed(
            f"Llama of width {width}, forward and backward",
            {system: step(system, width) for system in ("plain", "weft")}, num_rounds,
        )
        for width in WIDTHS
    ]


# New lengths.


def prefill(model: Any) -> Callable[[int], float]:
    """Nanoseconds of a forward without gradients, by length."""
    @torch.no_grad()
    def run(length: int) -> float:
        given = tokens(some(length))
        return once(lambda: model(input_ids=given, use_cache=False))

    return run


def training(model: Any) -> Callable[[int], float]:
    """Nanoseconds of forward and backward, by length."""
    def run(length: int) -> float:
        given = tokens(some(length))
        taken = once(
            lambda: model(input_ids=given, labels=given, use_cache=False).loss.backward())
        for each in model.parameters():
            each.grad = None
        return taken

    return run


@torch.no_grad()
def decoding(model: Any, start: int, num_steps: int) -> Iterator[float]:
    """Nanoseconds of each step that takes one token more: the cache grows."""
    out = model(input_ids=tokens(some(start)), use_cache=True)
    for _ in range(num_steps):
        cache, last = out.past_key_values, out.logits[:, -1:].argmax(-1)
        kept: list[Any] = []
        yield once(lambda cache=cache, last=last, kept=kept: kept.append(
            model(input_ids=last, past_key_values=cache, use_cache=True)))
        (out,) = kept


def _row(name: str, pairs: list[tuple[float, float]], limit: float) -> Row:
    new, met = (statistics.median(times) / 1e3 for times in zip(*pairs))
    ratio = statistics.median(one / other for one, other in pairs)
    return Row(name, {"new length": new, "met": met}, [Figure("new to met", ratio, limit)])


def _twice(run: Callable[[int], float], num_rounds: int) -> list[tuple[float, float]]:
    for _ in range(4):
        run(next(_lengths))
    pairs = []
    for _ in range(max(num_rounds, 5)):
        length = next(_lengths)
        pairs.append((run(length), run(length)))
        gc.collect(0)
    return pairs


def _grown(model: Any, num_rounds: int) -> list[tuple[float, float]]:
    """The cache grows twice over the same lengths, which begin where no call has been."""
    list(decoding(model, 200, 4))
    num_steps = max(num_rounds, 5)
    first, again = (list(decoding(model, 210, num_steps)) for _ in range(2))
    return list(zip(first, again))


def measure_lengths(num_rounds: int) -> list[Row]:
    """Steps of new lengths."""
    model = llama(64)
    weft.distribute_module(model, world.weft_line())
    gc.collect()
    gc.disable()
    try:
        return [
            _row("prefill", _twice(prefill(model), num_rounds), OF_NEW_LENGTH),
            _row("training", _twice(training(model), num_rounds), OF_NEW_LENGTH),
            _row("decoding, the cache grows", _grown(model, num_rounds), OF_GROWING_CACHE),
        ]
    finally:
        gc.enable()
