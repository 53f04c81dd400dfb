"""The models: small, with random weights, each with its shardings and its batches.

A model comes in two sizes: `even`, whose heads, widths, vocabulary and batch the meshes here
divide, and `uneven`, which none of them divides. Nothing of a model is changed: the shardings name
its parameters, and its inputs are ShardTensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft import P

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

hf: Any = transformers  # its configurations take more than they declare
hf.utils.logging.set_verbosity_error()

__all__ = ["MODELS", "Model", "Size"]

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes that all models share, in elements."""

    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    batch: int
    length: int

    @property
    def width(self) -> int:
        return self.heads * self.head_width


SIZES = {
    "even": Size(heads=4, kv_heads=4, head_width=8, hidden=48, vocabulary=64, batch=4, length=8),
    "uneven": Size(heads=6, kv_heads=3, head_width=6, hidden=50, vocabulary=67, batch=5, length=7),
}


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Args:
        build: makes it of a size, the name of its attention, and what drops.
        shardings: of its parameters, for tensor parallelism over the axis "tp".
        batch: its inputs of a size.
        stream: the module whose output is the residual stream; cut by position there, it stays so.
    """

    build: Callable[[Size, str, float], nn.Module]
    shardings: Mapping[str, P]
    batch: Callable[[Size], Batch]
    stream: str

    def make(self, size: str, attention: str, dropout: float = 0.0) -> nn.Module:
        """The model in train mode, with the same weights each time."""
        torch.manual_seed(0)
        return self.build(SIZES[size], attention, dropout).train()

    def inputs(self, size: str) -> Batch:
        """A batch, the same each time."""
        torch.manual_seed(1)
        return self.batch(SIZES[size])


def _tokens(size: Size) -> Batch:
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length))
    return {"input_ids": tokens, "labels": tokens}


def _masked(size: Size) -> Batch:
    """Sequences that end early, as the attention mask says."""
    batch = _tokens(size)
    ends = size.length - torch.arange(size.batch) % 3
    mask = (torch.arange(size.length) < ends[:, None]).long()
    labels = torch.where(mask.bool(), batch["labels"], -100)
    return {**batch, "labels": labels, "attention_mask": mask}


def _in_one_segment(size: Size) -> Batch:
    """As a tokenizer gives them: without, BERT makes all segments itself, on every rank."""
    batch = _masked(size)
    return {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}


def _images(size: Size) -> Batch:
    return {"pixel_values": torch.randn(size.batch, 3, 12, 12),
            "labels": torch.randint(0, 7, (size.batch,))}


def _llama(size: Size, attention: str, dropout: float) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.hidden,
        num_hidden_layers=2, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=16, tie_word_embeddings=True, attention_dropout=dropout,
        attn_implementation=attention,
    ))


def _mixtral(size: Size, attention: str, dropout: float) -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(
        vocab_size=size.vocabulary, hidden_size=size.width,
        intermediate_size=-(-size.hidden // 4) * 4,  # torch's grouped_mm asks for 16 bytes
        num_hidden_layers=2, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=4,
        output_router_logits=True, attention_dropout=dropout, attn_implementation=attention,
    ))


def _gpt2(size: Size, attention: str, dropout: float) -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=size.vocabulary, n_embd=size.width, n_inner=size.hidden, n_layer=2,
        n_head=size.heads, n_positions=16, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=None, eos_token_id=None, attn_implementation=attention,
    ))


def _bert(size: Size, attention: str, dropout: float) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.hidden,
        num_hidden_layers=2, num_attention_heads=size.heads, max_position_embeddings=16,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    ))


def _vit(size: Size, attention: str, dropout: float) -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(
        hidden_size=size.width, intermediate_size=size.hidden, num_hidden_layers=2,
        num_attention_heads=size.heads, image_size=12, patch_size=4, num_labels=7,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    ))


COLUMNS, ROWS = P("tp"), P(None, "tp")
"""A Linear's weight is (out, in): cut by what comes out, or by what goes in."""

MODELS = {
    "llama": Model(
        _llama,
        {"*.embed_tokens.weight": P("tp"), "*.[qkv]_proj.weight": COLUMNS, "*.o_proj.weight": ROWS,
         "*.gate_proj.weight": COLUMNS, "*.up_proj.weight": COLUMNS, "*.down_proj.weight": ROWS},
        _masked,
        "model.embed_tokens",
    ),
    "mixtral": Model(  # whole experts on each rank; five of them
        _mixtral,
        {"*.embed_tokens.weight": P("tp"), "*.[qkv]_proj.weight": COLUMNS, "*.o_proj.weight": ROWS,
         "*.experts.*": P("tp"), "lm_head.weight": COLUMNS},
        _masked,
        "model.embed_tokens",
    ),
    "gpt2": Model(  # its Conv1D has weights (in, out)
        _gpt2,
        {"*.wte.weight": P("tp"), "*.c_attn.weight": P(None, "tp"),
         "*.c_attn.bias": P("tp"), "*.c_fc.weight": P(None, "tp"),
         "*.c_fc.bias": P("tp"), "*.c_proj.weight": P("tp")},
        _tokens,
        "transformer.wte",
    ),
    "bert": Model(
        _bert,
        {"*.word_embeddings.weight": P("tp"), "cls.predictions.bias": P("tp"),
         "*.self.*": P("tp"), "*.attention.output.dense.weight": ROWS,
         "*.intermediate.dense.*": P("tp"), "*.layer.?.output.dense.weight": ROWS},
        _in_one_segment,
        "bert.embeddings",
    ),
    "vit": Model(
        _vit,
        {"*.[qkv]_proj.*": P("tp"), "*.o_proj.weight": ROWS, "*.fc1.*": P("tp"),
         "*.fc2.weight": ROWS},
        _images,
        "vit.embeddings",
    ),
}
