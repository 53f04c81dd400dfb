"""The demo in miniature: two blocks, a few steps, simulated ranks beside one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import weft
from demo.model import Settings
from demo.text import SEPARATOR, Corpus
from demo.train import MESH, NUM_RANKS, Run, distributed, plain
from tests.harness import held
from tests.oracle import check

RUN = Run(
    Settings(context=12, num_blocks=2, head_width=4, hidden=13), num_steps=4, batch=7,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus([Path(__file__), Path(torch.__file__)])


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("mesh", [MESH, {"dp": 1, "tp": 2}, {"dp": 4, "tp": 2}, {"dp": 8, "tp": 2}],
                         ids=str)
def test_losses_gradients_and_parameters_are_those_of_one_process(
    corpus: Corpus, mesh: dict[str, int]
) -> None:
    def on_rank(bound):
        model, steps = distributed(RUN, corpus, bound)
        made, first = [next(steps).loss], [held(each) for each in gradients_of(model)]
        made += [step.loss for step in steps]
        return made, first, [held(each.detach()) for each in model.parameters()]

    model, steps = plain(RUN, corpus)
    losses, gradients = [next(steps).loss], [each.clone() for each in gradients_of(model)]
    losses += [step.loss for step in steps]
    ranks = weft.testing.run(on_rank, mesh["dp"] * mesh["tp"], mesh)
    for made, _, _ in ranks:
        assert made == pytest.approx(losses, rel=1e-6)
    parameters = dict(model.named_parameters())
    assert len(gradients) == len(parameters)
    for place, (name, parameter) in enumerate(parameters.items()):
        check(gradients[place], [first[place] for _, first, _ in ranks], f"gradient of {name}")
        check(parameter.detach(), [last[place] for _, _, last in ranks], name)


def test_a_step_moves_each_activation_once(corpus: Corpus) -> None:
    def on_rank(mesh):
        _, steps = distributed(RUN, corpus, mesh)
        with weft.explain() as log:
            next(steps)
        return Counter(
            (event.axes, event.direction) for event in log.events
            if event.nbytes >= 3 * RUN.settings.context * RUN.settings.width * 4
        )

    # Embedding and both halves of each block leave terms to sum over tp, and so do the gradients
    # of the head's input and of both halves' inputs. Gradients of parameters cross dp.
    crossings = 2 * RUN.settings.num_blocks + 1
    for large in weft.testing.run(on_rank, NUM_RANKS, MESH):
        assert large[("tp",), "forward"] == large[("tp",), "backward"] == crossings
        assert large[("dp",), "forward"] == 0


def test_a_corpus_is_its_files_with_a_separator_before_each(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"ab")
    (tmp_path / "b.py").write_bytes(bytes([255]))
    corpus = Corpus([tmp_path / "a.py", tmp_path / "b.py"])
    assert corpus.tokens.tolist() == [SEPARATOR, ord("a"), ord("b"), SEPARATOR, 255]


def test_batches_depend_on_the_step_alone(corpus: Corpus) -> None:
    tokens, targets = corpus.batch(3, 7, 12)
    assert tokens.shape == targets.shape == (7, 12)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(corpus.batch(3, 7, 12)[0], tokens)
    assert not torch.equal(corpus.batch(4, 7, 12)[0], tokens)
