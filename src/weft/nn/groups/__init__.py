"""Parameters that are gathered for their module, freed after it, and gathered again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weft.nn.groups.hooks import has_group, install
from weft.nn.groups.policy import Gather, check_gather, policies_of
from weft.tensor import ShardTensor

__all__ = ["Gather", "check_gather", "gather_in_groups"]


def gather_in_groups(module: nn.Module, given: Mapping[str, Any] | bool | None) -> None:
    """Have the module's sharded parameters gathered by groups where its batch is sharded alike."""
    for path, part, policy in list(policies_of(module, given)):
        sharded = any(
            type(one) is ShardTensor and one.sharding.sharded_axes for one in part.parameters())
        if sharded and not has_group(part):
            install(part, path, policy)
