"""State-space models and linear recurrent units whose input is sharded along the sequence, with
`weft.linear_scan` in place of the loop over time steps.

What moves does not depend on the length, and a rank's memory is its share.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.models.catalogue import hf
from tests.models.test_sequences import step
from weft import P
from weft.testing import peak_memory

RANKS = 4
MAMBA = hf.models.mamba.modeling_mamba
GEMMA = hf.models.recurrent_gemma.modeling_recurrent_gemma


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(
        vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1, use_mambapy=True,
        use_cache=False))


def recurrent_gemma() -> nn.Module:
    return hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(
        vocab_size=64, hidden_size=16, lru_width=16, num_attention_heads=2, num_hidden_layers=1,
        intermediate_size=32, block_types=["recurrent"], use_cache=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2))


MODELS = {"mamba": mamba, "recurrent gemma": recurrent_gemma}


def scan(
    self: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor,
    recurrent_states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """RecurrentGemma's, without its loop."""
    states = weft.linear_scan(recurrent_gate * ~reset, hidden_states, 1, recurrent_states)
    return states, states[:, -1]


def put_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba asks for the scan of a package; RecurrentGemma has a method."""
    module = SimpleNamespace(pscan=lambda a, b: weft.linear_scan(a, b, 1))
    monkeypatch.setitem(sys.modules, "mambapy.pscan", module)  # type: ignore[arg-type]
    monkeypatch.setattr(MAMBA, "is_mambapy_available", lambda: True)
    monkeypatch.setattr(GEMMA.RecurrentGemmaRglru, "_rnn_scan", scan)
    weft.register_rule(GEMMA.SqrtBoundDerivative, "... -> ...")


@pytest.mark.parametrize("name", MODELS)
def test_bytes_do_not_depend_on_the_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And values and gradients are those of the loop in one process."""
    torch.manual_seed(0)
    model = MODELS[name]()
    state = model.state_dict()
    given = torch.randint(0, 64, (1, 64))

    def on_rank(mesh: Any, length: int) -> tuple[int, int, int]:
        mine = MODELS[name]()
        mine.load_state_dict(state)
        tokens = weft.distribute_tensor(given[:, :length], mesh, P(None, "x"))
        with weft.explain() as log, peak_memory(mine, tokens) as memory:
            out = step(mine, tokens)
        assert out.logits.sharding.spec == P(None, "x")
        if length == 32:
            for one, other in zip(mine.parameters(), model.parameters()):
                torch.testing.assert_close(one.grad, other.grad, rtol=2e-4, atol=1e-6)
        return log.nbytes, len(log.events), memory.peak

    step(model, given[:, :32])
    put_scans(monkeypatch)
    try:
        short, long = (weft.testing.run(partial(on_rank, length=length), mesh={"x": RANKS})
                       for length in (32, 64))
    finally:
        weft.unregister_rule(GEMMA.SqrtBoundDerivative)
    assert [one[:2] for one in short] == [one[:2] for one in long]
    with peak_memory(model, given) as alone:
        step(model, given)
    assert max([memory for _, _, memory in long]) <= 1.4 / RANKS * alone.peak
