"""What a step moves, beside tensor parallelism written by hand.

By hand (Megatron-LM, Shoeybi et al. 2019): the parameters are cut as in the catalogue, and the
residual stream is whole on every rank of tp, n bytes of it on each (those of its share of dp).

- An all-reduce of it over g ranks brings 2 n (1 - 1/g) to each. Forward there is one after the
  embedding, whose vocabulary is cut, and two in each block, after the matrices that are cut by
  rows. Backward there are two in each block, where the matrices cut by columns took the stream in,
  and one where the head took it in, if its vocabulary is cut.
- With sequence sharding (Korthikanti et al. 2022) each becomes a reduce-scatter and an all-gather,
  n (1 - 1/g) each, so the sum is the same.
- Over dp the gradient of every parameter is all-reduced once, as it lies; with sequence sharding
  those of the parameters that meet the stream in shards, over tp too.
- The cross-entropy of logits cut by classes takes the maximum, the sum of exponentials and the sum
  of gradients of each token: three all-reduces of a number per token. (By hand the last is known.)

Beside that there are the loss and, where there is an attention mask, two counts: single numbers.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import weft
from tests.models.catalogue import MODELS, SIZES
from tests.models.training import WAYS, distributed

COUNTED = [name for name in MODELS if name != "mixtral"]
"""Which token goes to which expert, and so what moves, data decide."""

NUM_BLOCKS = 2
SINGLE = 8 * 4
"""Bytes of the loss's sums and of counts: numbers, each by an all-reduce over some axis."""


def all_reduce(nbytes: float, size: int) -> float:
    return 2 * nbytes * (1 - 1 / size)


def of_the_stream(name: str, dp: int, tp: int, with_sequences: bool) -> float:
    size = SIZES["even"]
    length = 10 if name == "vit" else size.length  # 9 patches and a class token
    nbytes = size.batch // dp * length * size.width * 4
    ends = 0 if name == "vit" else 2
    total = (4 * NUM_BLOCKS + ends) * all_reduce(nbytes, tp)
    if with_sequences and name in ("bert", "vit"):  # it is whole where it begins: gathered there
        total += nbytes * (1 - 1 / tp)
    return total


OUTSIDE = re.compile(r"embeddings\.|wpe|(o_proj|c_proj|output\.dense|fc2|classifier)\.bias")
"""Parameters whose gradients are complete on each rank of tp, also where sequences are cut: those
before the stream, and biases that one rank adds to its term."""


def of_gradients(model: torch.nn.Module, dp: int, tp: int, with_sequences: bool) -> float:
    total = 0.0
    for name, parameter in model.named_parameters():
        shape = list(parameter._meta.local_shape)
        if "wpe" in name or "position_embeddings.weight" in name:
            shape[0] = SIZES["even"].length  # no more positions are used, and sent
        if with_sequences and name == "classifier.weight":  # cut by columns
            total += all_reduce(math.prod(shape) * 4 / tp, dp) + math.prod(shape) * 4 * (1 - 1 / tp)
            continue
        in_shards = with_sequences and parameter.sharding.is_replicated and not OUTSIDE.search(name)
        total += all_reduce(math.prod(shape) * 4, dp * tp if in_shards else dp)
    return total


def of_the_loss(name: str, dp: int, tp: int) -> float:
    size = SIZES["even"]
    tokens = size.batch // dp * size.length
    return 0 if name == "vit" else 3 * all_reduce(tokens * 4, tp)


def of_gpt2(dp: int, tp: int, with_sequences: bool) -> float:
    """What its form costs, each way.

    It keeps queries, keys and values in one matrix, in this order. Of its columns cut in two, the
    first rank has all queries and the first half of the keys, and lacks its half of the values, the
    second its half of the queries: half of a stream. And it flattens batch and positions before
    each matrix: of two sequences whose halves a rank has it is to have one, and lacks half of that;
    after the matrices cut by rows the sum is still to be taken, and nothing is to be moved.
    """
    assert tp == 2
    size = SIZES["even"]
    nbytes = size.batch // dp * size.length * size.width * 4
    return 2 * NUM_BLOCKS * (nbytes / 2 + with_sequences * 2 * nbytes / tp / 2)


def of_vit(dp: int, tp: int, with_sequences: bool) -> float:
    """The class token is repeated for all images on every rank, which takes its own: the gradients
    of the others' copies come back, instead of their sum. Of sequences that are cut the first rank
    has it, and shares its columns out: their gradients come back, and scores are summed."""
    size = SIZES["even"]
    own = size.batch // dp * size.width * 4
    scores = all_reduce(size.batch // dp * 7 * 4, tp)
    back = with_sequences * (own * (1 - 1 / tp) + scores)
    return (dp - 1) * own - all_reduce(size.width * 4, dp) + back


def step(mesh: Any, way: str, name: str, attention: str) -> tuple[int, str, float]:
    """Bytes that this rank receives, their list, and what gradients take."""
    model, inputs = distributed(mesh, WAYS[way], name, "even", attention, 0.0)
    with weft.explain() as log:
        model(**inputs).loss.backward()
    dp, tp = mesh.axis_sizes
    return log.nbytes, str(log), of_gradients(model, dp, tp, WAYS[way].stream is not None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("way", ["dp x tp", "tp with sequences"])
@pytest.mark.parametrize("name", COUNTED)
def test_as_by_hand(name: str, way: str, attention: str) -> None:
    dp, tp = WAYS[way].mesh.values()
    with_sequences = WAYS[way].stream is not None
    expected = of_the_stream(name, dp, tp, with_sequences) + of_the_loss(name, dp, tp)
    if name == "gpt2":
        expected += of_gpt2(dp, tp, with_sequences)
    if name == "vit":
        expected += of_vit(dp, tp, with_sequences)
    for nbytes, said, gradients in weft.testing.run(
        lambda mesh: step(mesh, way, name, attention), mesh=WAYS[way].mesh
    ):
        more = nbytes - expected - gradients
        assert more <= SINGLE, f"{more} bytes more than {expected} + {gradients}:\n{said}"
        assert more >= 0, f"the count by hand is {-more} too high:\n{said}"
