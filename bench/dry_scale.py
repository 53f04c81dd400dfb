"""Dry runs of large models on many ranks, and what each takes on one core.

    python -m bench.dry_scale                 # all, each in a process of its own
    python -m bench.dry_scale "Llama 70B"     # one, with its report
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import weft
from weft import P

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

hf: Any = transformers
TOKENS = 8192
"""Of a sequence, of which each rank of dp has one."""


COLUMNS, ROWS = P(("tp", "dp")), P("dp", "tp")
ATTENTION = {"*.inv_freq": P(), "*.embed_tokens.weight": COLUMNS, "lm_head.weight": COLUMNS,
             "*.[qkv]_proj.weight": COLUMNS, "*.o_proj.weight": ROWS}
DENSE = {**ATTENTION, "*.up_proj.weight": COLUMNS, "*.gate_proj.weight": COLUMNS,
         "*.down_proj.weight": ROWS, "*": P("dp")}
"""Tensor parallel over tp, and of these parts fully sharded over dp."""

EXPERTS = {**ATTENTION, "*.experts.*": P("tp", "dp"), "*": P("dp")}
"""Whole experts on the ranks of tp, and of these a part on each rank of dp."""


def _llama(**sizes: int) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=128_256, num_key_value_heads=8, max_position_embeddings=TOKENS, **sizes))


def _mixtral() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(
        vocab_size=32_768, hidden_size=6144, intermediate_size=16_384, num_hidden_layers=56,
        num_attention_heads=48, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=TOKENS))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its shardings, and the mesh."""

    build: Any
    shardings: Mapping[str, P]
    mesh: Mapping[str, int]


CASES = {
    "Llama 70B": Case(
        lambda: _llama(hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
                       num_attention_heads=64), DENSE, {"dp": 64, "tp": 8}),
    "Llama 405B": Case(
        lambda: _llama(hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126,
                       num_attention_heads=128), DENSE, {"dp": 8192, "tp": 8}),
    "Mixtral 8x22B": Case(_mixtral, EXPERTS, {"dp": 64, "tp": 8}),
}


def program(mesh: Any, name: str) -> None:
    """Two steps in bfloat16."""
    case = CASES[name]
    with torch.device("meta"):
        model = case.build().to(torch.bfloat16)
    model.activation_checkpointing_enable()
    weft.distribute_module(model, mesh, shardings=case.shardings)
    weft.nn.materialize(model, model._init_weights)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = weft.randint(32_000, (case.mesh["dp"], TOKENS), mesh=mesh, spec=P("dp"))
    for _ in range(2):
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Print one report, or a row for each case."""
    if len(sys.argv) > 1:
        name = sys.argv[1]
        start = time.process_time()
        found = weft.dry_run(lambda mesh: program(mesh, name), CASES[name].mesh, device="h100")
        took = time.process_time() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(found)
        print(f"| {name} | {found.mesh.size():,} | {took:.0f} | {memory / 1e9:.2f} GB |")
        return
    print("| model | ranks | seconds of CPU | memory of the process |\n|---|---|---|---|")
    for name in CASES:
        done = subprocess.run([sys.executable, "-m", "bench.dry_scale", name], check=True,
                              capture_output=True, text=True)
        print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
