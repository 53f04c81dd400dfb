"""Parameters that are gathered for their module, freed after it, and gathered again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weft.nn.groups.accumulation import accumulate
from weft.nn.groups.hooks import has_group, install
from weft.nn.groups.policy import Gather, check_gather, policies_of
from weft.tensor import ShardTensor

__all__ = ["Gather", "accumulate", "check_gather", "gather_in_groups"]


def gather_in_groups(module: nn.Module, given: Mapping[str, Any] | bool | None) -> None:
    """Gather the module's parameters by groups, if they are sharded as its batch is."""
    policies = list(policies_of(module, given))
    casts = any(policy is not None and policy.casts for _, _, policy in policies)
    for path, part, policy in policies:
        if not has_group(part) and any(type(one) is ShardTensor for one in part.parameters()):
            install(part, path, policy, casts)
