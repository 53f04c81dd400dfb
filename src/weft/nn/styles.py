"""Ready-made shardings: what column, row, vocabulary and sequence parallel mean for a module.

They stand where a spec may stand in `shardings=`, under a pattern of module names, and say which
dim of which of the module's own parameters is cut. Activations need no such word, for they follow
from the layouts of parameters and inputs; `SequenceParallel`, `input_layouts`, `output_layouts` and
the `PrepareModule...` pin them where one wants another layout than follows.

The names are those of torch.distributed.tensor.parallel. The method is that of Megatron-LM (Shoeybi
et al., 2019), sequence parallel that of Korthikanti et al. (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from weft.core import AxisName, Layout, Mesh, P, Placement, Replicate, Shard
from weft.core.arguments import Placements
from weft.errors import MeshError, ModuleError, PlacementError, message
from weft.nn.pins import Cut, PrepareModuleInput, PrepareModuleOutput

__all__ = [
    "ColwiseParallel", "RowwiseParallel", "SequenceParallel", "Style", "VocabParallel", "axis_of",
]

Cuts = Mapping[Any, Mapping[str, int]]
"""Type of module -> name of a parameter -> the dim of it that is cut; others are replicated."""

_CONV: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TABLE: Any = (nn.Embedding, nn.EmbeddingBag)


class Style:
    """A sharding of the parameters of a module, whatever their names.

    Args:
        axis: the mesh axis, or axes (major to minor), to cut by. None: the mesh's only one.
        input_layouts, output_layouts: what the module's first input and its output are brought to:
            a spec, or a placement (`Shard(1)`, `Replicate()`), which says what the style's axis
            does and leaves the others. None: what follows.
    """

    cuts: ClassVar[Cuts | None] = None
    """Which dims are cut; None: none, of any type of module."""

    def __init__(
        self, axis: AxisName | tuple[AxisName, ...] | None = None, *,
        input_layouts: Placements | Placement | None = None,
        output_layouts: Placements | Placement | None = None,
    ) -> None:
        self.axis, self.input_layouts, self.output_layouts = axis, input_layouts, output_layouts

    @property
    def only_cuts(self) -> bool:
        """Whether it says nothing of a module without parameters."""
        pinned = self.input_layouts is not None or self.output_layouts is not None
        return self.cuts is not None and not pinned

    def pins(self, mesh: Mesh) -> list[PrepareModuleInput | PrepareModuleOutput]:
        """What of the module's activations is pinned."""
        kinds = (PrepareModuleInput, self.input_layouts), (PrepareModuleOutput, self.output_layouts)
        return [kind(self._laid(spec, mesh)) for kind, spec in kinds if spec is not None]

    def _laid(self, spec: Any, mesh: Mesh) -> Any:
        """A spec; of a placement the cut that it means for the style's axis.

        Raises:
            PlacementError: a placement that neither cuts (without sizes) nor replicates.
        """
        if isinstance(spec, (P, Layout, list, tuple)):
            return spec
        if not (spec == Shard(getattr(spec, "dim", 0)) or spec == Replicate()):
            raise PlacementError(
                message(repr(self), f"{spec!r} is asked of {self.axis!r}",
                        "a placement of an activation is Shard(dim) or Replicate()", [repr(spec)],
                        "a whole spec, P(...)")
            )
        axis = axis_of(self.axis, mesh, self)
        axes = axis if isinstance(axis, tuple) else (axis,)
        return Cut(mesh.axes(axes, repr(self)), getattr(spec, "dim", None))

    def spec(self, module: nn.Module, key: str, mesh: Mesh) -> P | None:
        """The spec of one of a module's own parameters; None for a module of another type."""
        if self.cuts is None:
            return P()
        for kind, dims in self.cuts.items():
            if isinstance(module, kind):
                dim = dims.get(key)
                return P() if dim is None else P(*(None,) * dim, axis_of(self.axis, mesh, self))
        return None

    def refusal(self, module: nn.Module, path: str) -> ModuleError:
        """The error about a module of another type."""
        known = [kind for kinds in self.cuts or () for kind in (
            kinds if isinstance(kinds, tuple) else (kinds,))]
        return ModuleError(
            message(f"shardings: {self!r}", f"{path!r} is a {type(module).__name__}, with "
                    "parameters of its own",
                    "it knows what to cut of " + ", ".join(kind.__name__ for kind in known),
                    [path or "the module itself"],
                    f'shardings={{"{path}.weight": P(...)}}')
        )

    def __repr__(self) -> str:
        shown = [] if self.axis is None else [repr(self.axis)]
        for name in ("input_layouts", "output_layouts"):
            given = getattr(self, name)
            shown += [] if given is None else [f"{name}={given!r}"]
        return f"{type(self).__name__}({', '.join(shown)})"


class ColwiseParallel(Style):
    """Cut what a module gives: the output features of a Linear, the columns of an Embedding.

    Linear, Bilinear and convolutions: dim 0 of weight and bias. Embedding, EmbeddingBag: dim 1.

    Args:
        axis: the mesh axis, or axes (major to minor), to shard over. None: the mesh's only one.
        input_layouts, output_layouts: what the module's first input and its output are brought to:
            placements of all axes, or one placement (`Shard(1)`, `Replicate()`) of the style's axis
            alone. None: what follows.

    Raises:
        MeshError: when the module is distributed: no such axis, or None on a mesh of several.
    """

    cuts: ClassVar[Cuts | None] = {
        (nn.Linear, nn.Bilinear, *_CONV): {"weight": 0, "bias": 0},
        _TABLE: {"weight": 1},
    }


class RowwiseParallel(Style):
    """Cut what a module takes: the input features of a Linear, the rows of an Embedding.

    Linear and convolutions: dim 1 of the weight; the bias is replicated. Embedding, EmbeddingBag:
    dim 0. What a sharded Linear gives is a partial value, which is reduced where it is used.

    Args:
        axis: the mesh axis, or axes (major to minor), to shard over. None: the mesh's only one.
        input_layouts, output_layouts: what the module's first input and its output are brought to:
            placements of all axes, or one placement (`Shard(1)`, `Replicate()`) of the style's axis
            alone. None: what follows.

    Raises:
        MeshError: when the module is distributed: no such axis, or None on a mesh of several.
    """

    cuts: ClassVar[Cuts | None] = {(nn.Linear, *_CONV): {"weight": 1}, _TABLE: {"weight": 0}}


class VocabParallel(Style):
    """Cut a vocabulary: the rows of an Embedding, the logits of the Linear that is its head.

    Both cut dim 0 of the weight, so that one style serves tied weights. `cross_entropy` takes
    logits that are sharded so as they are.

    Args:
        axis: the mesh axis, or axes (major to minor), to shard over. None: the mesh's only one.
        input_layouts, output_layouts: what the module's first input and its output are brought to:
            placements of all axes, or one placement (`Shard(1)`, `Replicate()`) of the style's axis
            alone. None: what follows.

    Raises:
        MeshError: when the module is distributed: no such axis, or None on a mesh of several.
    """

    cuts: ClassVar[Cuts | None] = {_TABLE: {"weight": 0}, nn.Linear: {"weight": 0, "bias": 0}}


class SequenceParallel(Style):
    """Replicate a module's parameters, and cut the sequence of its first input.

    For layer norms, RMS norms and dropouts, which so compute and keep a share of each sequence.

    Args:
        axis: as in all styles.
        sequence_dim: the dim of the sequence. What else cuts the input stays.
    """

    def __init__(
        self, axis: AxisName | tuple[AxisName, ...] | None = None, *, sequence_dim: int = 1
    ) -> None:
        super().__init__(axis, input_layouts=Shard(sequence_dim))


def axis_of(axis: Any, mesh: Mesh, style: Style) -> Any:
    """The axis that a style cuts by.

    Raises:
        MeshError: none is named, and the mesh has several.
    """
    if axis is not None:
        return axis
    if mesh.ndim != 1:
        names = list(mesh.axis_names)
        raise MeshError(
            message(f"shardings: {style!r}", f"it names no axis, and {mesh} has {mesh.ndim}: "
                    f"{', '.join(map(str, names))}", "the axis may be left out on a mesh of one",
                    [repr(style)], f"{type(style).__name__}({names[-1] if names else 'tp'!r})")
        )
    return mesh.axis_names[0]
