"""Ready-made shardings: column, row, vocabulary and sequence parallelism for a module.

A style replaces a spec in `shardings=`, under a pattern of module names. It says which dims of the
module's own parameters are sharded. Activations need no declaration, because their layouts follow
from those of parameters and inputs. The weight of a Linear or a convolution stays where it is. If
the same axis shards its input, for example the sequence, the input moves to the weight (gathered
for columns, exchanged for rows), even if the weight is smaller. So no rank holds a whole weight.
`SequenceParallel`, `input_layouts`, `output_layouts` and the `PrepareModule...` styles fix other
layouts.

The names are those of torch.distributed.tensor.parallel. The method is that of Megatron-LM (Shoeybi
et al., 2019), sequence parallelism that of Korthikanti et al. (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from weft.core import AxisName, Layout, Mesh, P, Placement, Replicate, Shard
from weft.core.arguments import Placements
from weft.core.names import also_called
from weft.errors import MeshError, ModuleError, PlacementError
from weft.nn.pins import Brought, Cut, PrepareModuleInput, PrepareModuleOutput

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "Style", "VocabParallel"]

Cuts = Mapping[Any, Mapping[str, int]]
"""Type of module -> name of a parameter -> the dim of it that is sharded; others replicated."""

_CONV: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TABLE: Any = (nn.Embedding, nn.EmbeddingBag)
_LAYERS: Any = (nn.Linear, *_CONV)


_ADVICE = {"use_local_output": "x.to_local() where the block of a result is wanted"}


class Style:
    """A sharding of the parameters of a module, whatever their names. `ColwiseParallel` explains
    the arguments."""

    cuts: ClassVar[Cuts | None] = None
    """Which dims are sharded; None: none, for any type of module."""

    reads: ClassVar[int | None] = None
    """The dim of the input that has to be sharded like the weight of a layer; None: no dim."""

    @also_called(_ADVICE)
    def __init__(
        self, axis: AxisName | tuple[AxisName, ...] | None = None, *,
        input_layouts: Placements | Placement | None = None,
        output_layouts: Placements | Placement | None = None,
    ) -> None:
        self.axis, self.input_layouts, self.output_layouts = axis, input_layouts, output_layouts

    @property
    def only_cuts(self) -> bool:
        """Whether the style does nothing for a module without parameters."""
        pinned = self.input_layouts is not None or self.output_layouts is not None
        return self.cuts is not None and not pinned

    def pins(self, mesh: Mesh) -> list[PrepareModuleInput | PrepareModuleOutput]:
        """Which of the module's activations get fixed layouts."""
        kinds = (PrepareModuleInput, self.input_layouts), (PrepareModuleOutput, self.output_layouts)
        return [kind(self._laid(spec, mesh)) for kind, spec in kinds if spec is not None]

    def brings(self, module: Any, mesh: Mesh) -> Brought | None:
        """How the input of a layer moves to its weight; None for other modules."""
        if self.cuts is None or not isinstance(module, _LAYERS):
            return None
        axes = mesh.axes(self._axes(mesh), repr(self))
        dim = self.reads
        if dim is not None and not isinstance(module, nn.Linear):
            dim = 1 - module.weight.ndim  # its channels
        return Brought(axes, dim)

    def _laid(self, spec: Any, mesh: Mesh) -> Any:
        """A spec; for a placement, which shards (without sizes) or replicates, what it means for
        the style's axis."""
        if isinstance(spec, (P, Layout, list, tuple)):
            return spec
        if not (spec == Shard(getattr(spec, "dim", 0)) or spec == Replicate()):
            raise PlacementError(
                repr(self), f"{spec!r} is given for the axis {self.axis!r}",
                "a placement of an activation is Shard(dim) or Replicate()", [repr(spec)],
                "a whole spec, P(...)")
        return Cut(mesh.axes(self._axes(mesh), repr(self)), getattr(spec, "dim", None))

    def _axes(self, mesh: Mesh) -> tuple[AxisName, ...]:
        """The axes, by name; MeshError if none is named and the mesh has several."""
        if self.axis is not None:
            return self.axis if isinstance(self.axis, tuple) else (self.axis,)
        if mesh.ndim != 1:
            names = list(mesh.axis_names)
            raise MeshError(
                f"shardings: {self!r}", f"it names no axis, and {mesh} has {mesh.ndim}: "
                f"{', '.join(map(str, names))}", "the axis may be left out on a mesh of one",
                [repr(self)], f"{type(self).__name__}({names[-1] if names else 'tp'!r})")
        return mesh.axis_names

    def spec(self, module: nn.Module, key: str, mesh: Mesh) -> P | None:
        """The spec of one of a module's own parameters; None for a module of another type."""
        if self.cuts is None:
            return P()
        for kind, dims in self.cuts.items():
            if isinstance(module, kind):
                dim = dims.get(key)
                return P() if dim is None else P(*(None,) * dim, self._axes(mesh))
        return None

    def refusal(self, module: nn.Module, path: str) -> ModuleError:
        """The error about a module of another type."""
        known = [kind for kinds in self.cuts or () for kind in (
            kinds if isinstance(kinds, tuple) else (kinds,))]
        return ModuleError(
            f"shardings: {self!r}", f"{path!r} is a {type(module).__name__}, with "
            "parameters of its own",
            "the style shards " + ", ".join(kind.__name__ for kind in known),
            [path or "the module itself"],
            f'shardings={{"{path}.weight": P(...)}}')

    def __repr__(self) -> str:
        shown = [] if self.axis is None else [repr(self.axis)]
        for name in ("input_layouts", "output_layouts"):
            given = getattr(self, name)
            shown += [] if given is None else [f"{name}={given!r}"]
        return f"{type(self).__name__}({', '.join(shown)})"


class ColwiseParallel(Style):
    """Shard a module's output: the output features of a Linear, the columns of an Embedding.

    Linear, Bilinear and convolutions: dim 0 of weight and bias. Embedding, EmbeddingBag: dim 1.

    Args:
        axis: the mesh axis, or axes (major to minor), to shard over. None: the mesh's only one.
        input_layouts: the layout of the module's first input: placements of all axes, or one
            placement (`Shard(1)`, `Replicate()`) of the style's axis alone. None: what follows.
        output_layouts: that of its output, in the same words.

    Raises:
        MeshError: when the module is distributed: no such axis, or None on a mesh of several.
    """

    cuts: ClassVar[Cuts | None] = {
        (nn.Linear, nn.Bilinear, *_CONV): {"weight": 0, "bias": 0},
        _TABLE: {"weight": 1},
    }


class RowwiseParallel(Style):
    """Shard a module's input: the input features of a Linear, the rows of an Embedding.

    Linear and convolutions: dim 1 of the weight; the bias is replicated. Embedding, EmbeddingBag:
    dim 0. A Linear sharded like this returns a partial value, which is reduced where it is used.

    Args:
        axis: this and the others are those of `ColwiseParallel`.
    """

    cuts: ClassVar[Cuts | None] = {(nn.Linear, *_CONV): {"weight": 1}, _TABLE: {"weight": 0}}
    reads: ClassVar[int | None] = -1


class VocabParallel(Style):
    """Shard a vocabulary: the rows of an Embedding, the logits of the Linear that is its head.

    Both shard dim 0 of the weight, so one style serves tied weights. `cross_entropy` takes
    sharded logits directly.

    Args:
        axis: this and the others are those of `ColwiseParallel`.
    """

    cuts: ClassVar[Cuts | None] = {_TABLE: {"weight": 0}, nn.Linear: {"weight": 0, "bias": 0}}


class SequenceParallel(Style):
    """Replicate a module's parameters, and shard the sequence of its first input.

    For layer norms, RMS norms and dropouts, which then compute and keep a part of each sequence.

    Args:
        axis: as in all styles.
        sequence_dim: the dim of the sequence. Other sharding of the input stays.
    """

    @also_called(_ADVICE)
    def __init__(
        self, axis: AxisName | tuple[AxisName, ...] | None = None, *, sequence_dim: int = 1
    ) -> None:
        super().__init__(axis, input_layouts=Shard(sequence_dim))
