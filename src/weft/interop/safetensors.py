"""Files of safetensors: every rank writes its own blocks into one file.

Theory of operation. A file is a header, which says where the bytes of each tensor begin and end,
and the bytes of all tensors, row-major. So a block is a number of runs of bytes whose places follow
from the layout. The first rank makes the file in its full length, then each rank writes its runs
there; of replicas the first one does. No rank holds more than its blocks, and only metadata are
sent. All ranks have to see the same file.

`save_pretrained` of transformers prepares its files (tied weights, names, several files) on all
ranks alike. It runs on each of them as the only process; all but the first write everything except
tensors into a folder that is then deleted.

Source: the format, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from operator import mul
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.comm.communicator import as_bytes
from weft.core.layout import Box
from weft.errors import LayoutError, WeftError, message
from weft.interop.checkpoint import boxes_of
from weft.nn.libraries import as_one_process
from weft.tensor import ShardTensor
from weft.tensor.meta import contiguous_strides
from weft.tensor.placing.agreed import exchanged
from weft.tensor.placing.freed import local_data
from weft.tensor.placing.storage import telling_identity
from weft.tensor.views.moved import unwrap_view
from weft.transport.in_flight import landed

__all__ = ["save_file", "save_model", "save_pretrained"]

_ALIGNMENT = 8
"""The bytes of the first tensor begin at a multiple of this; widest dtypes come first."""

_NAMES = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32",
    "uint32": "U32", "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16",
    "int16": "I16", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}
"""The format's names of torch's dtypes, in the order in which tensors lie in a file."""


def save_file(
    original: Any, tensors: Mapping[str, Any], filename: Any,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """`safetensors.torch.save_file`: where there are ShardTensors, a call of all their ranks.

    Ranks outside their mesh write nothing. The first rank's `filename` and `metadata` count, and
    its values of plain tensors.

    Raises:
        LayoutError: ShardTensors of several meshes; on all ranks, if they have other tensors.
        UnsupportedOpError: a partial value.
        WeftError: on all ranks, if one cannot write.
    """
    mesh = _mesh_of(tensors)
    if mesh is None:
        return original(tensors, filename, metadata)
    if mesh.here is not None:
        _write(tensors, os.fspath(filename), metadata, mesh)


def save_model(
    original: Any, model: Any, filename: Any, metadata: Mapping[str, str] | None = None,
    *args: Any, **kwargs: Any,
) -> None:
    """`safetensors.torch.save_model`: tied tensors are written once, under their first name."""
    state = model.state_dict()
    mesh = _mesh_of(state)
    if mesh is None:
        return original(model, filename, metadata, *args, **kwargs)
    names: dict[int, str] = {}
    said = dict(metadata or {})
    for name in sorted(state):
        first = names.setdefault(_identity(state[name]), name)
        if first != name:
            said[name] = first
    kept = {name: state[name] for name in names.values()}
    return save_file(None, kept, filename, said or None)


def save_pretrained(original: Any, model: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """`save_pretrained` of transformers: a call of all ranks of the model's mesh."""
    call = inspect.signature(original).bind(model, folder, *args, **kwargs)
    given = call.arguments.get("state_dict")
    state = model.state_dict() if given is None else given
    mesh = _mesh_of(state)
    if mesh is None:
        return original(model, folder, *args, **kwargs)
    if mesh.here is None:
        return None
    aliases, first = _aliases(model, state), mesh.rank == mesh.rank_at(0)
    call.arguments["state_dict"] = {name: one for name, one in state.items() if name not in aliases}
    call.arguments["is_main_process"] = True
    with (
        as_one_process(), telling_identity(), _saving(model), tempfile.TemporaryDirectory() as other
    ):
        if not first:
            call.arguments["save_directory"] = other
            call.arguments["push_to_hub"] = False
        return original(*call.args, **call.kwargs)


@contextmanager
def _saving(model: Any) -> Iterator[None]:
    """All ranks save: otherwise transformers lets the first one of torch.distributed alone."""
    vars(model)["should_save_on_this_rank"] = lambda is_main_process: True
    try:
        yield
    finally:
        del vars(model)["should_save_on_this_rank"]


def _mesh_of(tensors: Any) -> BoundMesh | None:
    """The mesh of ShardTensors, which they have in common; None where there are none."""
    values = tensors.values() if isinstance(tensors, Mapping) else []
    meshes = {one._meta.mesh: None for one in values if type(one) is ShardTensor}
    if len(meshes) > 1:
        raise LayoutError(
            "save_file(tensors)", f"{len(meshes)} meshes hold the ShardTensors",
            "the ranks of one mesh write a file together", list(map(repr, meshes)),
            "a file for each mesh, or x.redistribute(mesh, placements) first")
    return next(iter(meshes), None)


def _identity(tensor: Any) -> int:
    """The same for tensors that share memory, on all ranks alike, empty blocks included."""
    local = unwrap_view(landed(tensor._local)) if type(tensor) is ShardTensor else tensor
    return local.untyped_storage()._cdata


def _aliases(model: Any, state: Mapping[str, Any]) -> set[str]:
    """The names that transformers leaves out, because they are tied to others that it writes."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    groups: dict[int, list[str]] = {}
    for name, one in state.items():
        if isinstance(one, torch.Tensor):
            groups.setdefault(_identity(one), []).append(name)
    return {
        name for names in groups.values() if not tied.issuperset(names) for name in names
        if name in tied and len(names) > 1
    }


def _write(
    tensors: Mapping[str, Any], filename: str, metadata: Mapping[str, str] | None, mesh: BoundMesh
) -> None:
    call, fault, places, head = "save_file(tensors)", None, {}, b""
    try:
        places, head = _planned(tensors, metadata)
        boxes = {name: _boxes(tensor, mesh) for name, tensor in tensors.items()}
    except WeftError as error:
        fault, boxes = error, {}
    told = exchanged(call, mesh, [filename, head], fault)
    if any(one[1] != told[0][1] for one in told):
        raise LayoutError(
            call, f"{len(told)} ranks write {len({one[1] for one in told})} different "
            "files", "ranks write the same names, dtypes, shapes and metadata into one "
            "file", [f"rank {mesh.rank_at(at)}: {len(one[1])} bytes of header"
                     for at, one in enumerate(told)], "the same state dict on all ranks")
    filename, end = told[0][0], max((stop for _, stop in places.values()), default=0)
    if mesh.rank == mesh.rank_at(0):
        fault = _tried(_made, filename, head, len(head) + end)
    exchanged(call, mesh, [], fault)
    runs = (
        (len(head) + places[name][0] + at, data)
        for name, tensor in tensors.items() for box in boxes[name]
        for at, data in _runs(tensor, box)
    )
    exchanged(call, mesh, [], _tried(_filled, filename, runs))


def _planned(
    tensors: Mapping[str, Any], metadata: Mapping[str, str] | None
) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Where the bytes of each tensor lie behind the header, and the header."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places: dict[str, tuple[int, int]] = {}
    begin = 0
    names = {name: _dtype(name, tensor) for name, tensor in tensors.items()}
    order = list(_NAMES.values())
    for name in sorted(names, key=lambda name: (order.index(names[name]), name)):
        tensor = tensors[name]
        places[name] = begin, begin + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": names[name], "shape": list(tensor.shape), "data_offsets": list(places[name]),
        }
        begin = places[name][1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return places, len(text).to_bytes(8, "little") + text


def _dtype(name: str, tensor: Any) -> str:
    found = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if found is None:
        raise LayoutError(
            "save_file(tensors)", f"{name} is of {tensor.dtype}",
            f"the format has {', '.join(_NAMES)}", [name], "x.to(dtype)")
    return found


def _boxes(tensor: Any, mesh: BoundMesh) -> list[Box]:
    """What this rank writes of a tensor: of replicas the first one does."""
    assert mesh.here is not None
    if type(tensor) is ShardTensor:
        found = boxes_of(tensor, "save_file(tensors)")
        cutting = tensor.sharding.sharded_axes
    else:
        found, cutting = [tuple([(0, length) for length in tensor.shape])], ()
    first = all(place == 0 for axis, place in enumerate(mesh.here) if axis not in cutting)
    return found if first and tensor.numel() else []


def _runs(tensor: Any, box: Box) -> Iterator[tuple[int, Any]]:
    """(its beginning in the tensor, bytes) of each run of a block."""
    data = as_bytes(local_data(tensor).detach().cpu()).numpy().data
    shape, size = tensor.shape, tensor.dtype.itemsize
    inner = len(shape)  # dims from here on are whole: one run
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    split, strides = max(inner - 1, 0), contiguous_strides(shape)
    length = math.prod(stop - start for start, stop in box[split:]) * size
    begins = (range(*one) if dim < split else one[:1] for dim, one in enumerate(box))
    for at, index in enumerate(product(*begins)):
        yield sum(map(mul, index, strides)) * size, data[at * length : (at + 1) * length]


def _made(filename: str, head: bytes, length: int) -> None:
    with open(filename, "wb") as file:
        file.write(head)
        file.truncate(length)


def _filled(filename: str, runs: Iterator[tuple[int, Any]]) -> None:
    with open(filename, "r+b") as file:
        for at, data in runs:
            file.seek(at)
            file.write(data)


def _tried(do: Any, filename: str, *args: Any) -> WeftError | None:
    """Call it; returns the error of a file that cannot be written."""
    try:
        do(filename, *args)
    except OSError as error:
        return WeftError(
            message("save_file(tensors)", f"{filename} cannot be written: {error}",
                    "all ranks write into one file, which the first one makes", [filename],
                    "a folder that all ranks share, with room for the file")
        )
    return None
