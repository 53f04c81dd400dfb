"""Which modules' parameters are gathered together, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from weft.errors import ShardTypeError
from weft.nn.match import refuse_idle_modules
from weft.nn.named import outermost_matches

__all__ = ["AUTOMATIC", "Gather", "check_gather", "policies_of"]


@dataclass(frozen=True, slots=True)
class Gather:
    """How the parameters of a module are gathered while it runs.

    Args:
        axes: the mesh axes to gather over. None: those that shard the batch (dim 0 of the outermost
            module's inputs), and those that shard another dim of the inputs and all parameters.
        free: whether parameters are freed after the forward, and gathered again in backward.
        compute_dtype: the dtype of parameters and inputs while the module runs. Parameters are cast
            before they are gathered; those that are not gathered are cast, too. None: their own.
            Under autocast, parameters that it casts at every use are gathered in its dtype.
        reduce_dtype: the dtype in which all gradients are reduced. None: compute_dtype, else their
            own.
    """

    axes: Any = None
    free: bool = True
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={one!r}" for name, one in (
                ("compute_dtype", self.compute_dtype), ("reduce_dtype", self.reduce_dtype))
            if one is not None and not (isinstance(one, torch.dtype) and one.is_floating_point)
        ]
        if wrong:
            raise ShardTypeError(
                "Gather(compute_dtype=, reduce_dtype=)", f"{len(wrong)} of 2 are no "
                "floating-point torch.dtype", "parameters are cast to one before they "
                "travel, and gradients before they are summed", wrong, "torch.bfloat16")

    @property
    def casts(self) -> bool:
        """Whether a dtype is named, which holds for any batch."""
        return self.compute_dtype is not None or self.reduce_dtype is not None


AUTOMATIC = Gather()
"""How they are where nothing is said."""

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def policies_of(
    module: nn.Module, given: Mapping[str, Any] | bool | None
) -> Iterator[tuple[str, nn.Module, Gather | None]]:
    """The modules that have a group of their own, with their names: the module itself, and the
    outermost members of its lists; or those that patterns match, and the module itself. If one
    pattern matches modules that contain each other, it applies to the outermost."""
    if given is None or given is True:
        yield "", module, AUTOMATIC
        for path, part in _members(module, ""):
            yield path, part, AUTOMATIC
        return
    if given is False:
        return
    matched = False
    for _, path, part, policy in outermost_matches(module, given):
        matched |= part is module
        yield path, part, Gather() if policy is True else policy or None
    if not matched:
        yield "", module, Gather()


def _members(module: nn.Module, above: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost members of the lists in a module. What has no forward is a list, too. A list of
    such lists only names them: its other members are as if they were attributes of the module.
    Lists of parametrizations hold what a module's own weights consist of: they are no parts."""
    named = [(f"{above}.{name}" if above else name, part) for name, part in module.named_children()
             if not (name == "parametrizations" and is_parametrized(module))]
    is_list = isinstance(module, _LISTS) or not _runs(module)
    is_list = is_list and all(_runs(part) or not part._modules for _, part in named)
    for path, part in named:
        if is_list and _runs(part):
            yield path, part
        else:
            yield from _members(part, path)


def _runs(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def check_gather(module: nn.Module, given: Any) -> None:
    """Raise LayoutError for a pattern of the argument `gather` that matches no module, and
    ShardTypeError for what is no map to Gather or bool."""
    if given is None or isinstance(given, bool):
        return
    wrong = [f"{given!r}"] if not isinstance(given, Mapping) else [
        f"{name!r}: {policy!r}" for name, policy in given.items()
        if not (isinstance(name, str) and (policy is None or isinstance(policy, (bool, Gather))))
    ]
    if wrong:
        raise ShardTypeError(
            "distribute_module(gather=)", f"{len(wrong)} parts are of other types",
            "gather is True, False, or a map from patterns of module names to Gather(...), "
            "True or False", wrong,
            'gather={"layers.*": weft.nn.Gather(free=False)}')
    refuse_idle_modules("gather", module, given)
