"""Files of safetensors: byte by byte what the plain library writes of the full tensors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import weft
from weft import LayoutError, P, UnsupportedOpError, WeftError

FULL = {
    "matrix": torch.randn(5, 6), "rows": torch.randn(7, 2, 3).bfloat16(), "flags": torch.eye(3) > 0,
    "cube": torch.randn(3, 4, 5, dtype=torch.float64), "number": torch.tensor(3), "none":
    torch.empty(0, 3), "pairs": torch.randn(4, 2, dtype=torch.complex64), "plain": torch.arange(3),
    "turned": torch.randn(6, 4),
}
SPECS: dict[str, Any] = {
    "matrix": P(None, "x"), "rows": P("y", None, "x"), "flags": P(("x", "y")), "cube": P(None, "x"),
    "number": P(), "none": P("x"), "pairs": P("y"), "turned": P("y", "x"),
}


@pytest.mark.parametrize("axes", [{"x": 4, "y": 1}, {"x": 2, "y": 3}], ids=str)
def test_blocks_make_the_file_of_the_whole(axes: dict[str, int], tmp_path: Path) -> None:
    plain, joint = tmp_path / "plain", tmp_path / "joint"
    save_file(FULL, plain, {"format": "pt"})

    def on_rank(mesh: Any) -> None:
        full = {**FULL, "turned": FULL["turned"].t().contiguous().t()}
        laid: Any = {name: weft.distribute_tensor(full[name], mesh, spec)
                     for name, spec in SPECS.items()}
        sizes = (0, 5, 1, 0) if axes["x"] == 4 else (2, 4)
        ragged = weft.Layout(mesh, (5, 6), P(None, "x"), sizes={1: sizes})
        laid["matrix"] = laid["matrix"].redistribute(placements=ragged)
        laid["pairs"] = laid["pairs"].conj().resolve_conj().conj()  # a lazy one, of these values
        save_file({**laid, "plain": FULL["plain"]}, joint, {"format": "pt"})

    weft.testing.run(on_rank, mesh=axes)
    assert joint.read_bytes() == plain.read_bytes()
    for name, value in load_file(joint).items():
        assert torch.equal(value, FULL[name])


def test_what_no_file_can_hold(tmp_path: Path) -> None:
    """All ranks say so."""
    def on_rank(mesh: Any) -> list[str]:
        x, said = weft.ones(4, mesh=mesh, spec=P("x")), []
        for tensors, folder, kind in [
            ({"x": weft.ones(4, mesh=mesh, spec=P(partial={"x": "sum"}))}, "", UnsupportedOpError),
            ({"x": x, "y": weft.ones(2, mesh=weft.init_mesh({"x": 1}))}, "", LayoutError),
            ({f"{mesh.rank}": x}, "", LayoutError),
            ({"x": x.to(torch.complex128)}, "", LayoutError),
            ({"x": x}, "nowhere", WeftError),
        ]:
            with pytest.raises(kind) as caught:
                save_file(tensors, tmp_path / folder / "file")
            said.append(str(caught.value))
        return said

    for said in weft.testing.run(on_rank, mesh={"x": 2}):
        for text, due in zip(said, ("a partial value", "2 meshes", "2 different files",
                                    "complex128", "cannot be ")):
            assert due in text


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    def module() -> nn.Module:
        out = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        out[1].weight = out[0].weight
        return out

    def on_rank(mesh: Any) -> dict[str, torch.Tensor]:
        laid = weft.distribute_module(module(), mesh, shardings={"*.weight": P("x")})
        save_model(laid, str(tmp_path / "file"))
        return {name: one.full_tensor() for name, one in laid.state_dict().items()}  # type: ignore

    full, *_ = weft.testing.run(on_rank, mesh={"x": 5})
    assert sorted(load_file(tmp_path / "file")) == ["0.bias", "0.weight", "1.bias"]
    other = module()
    load_model(other, tmp_path / "file")
    assert all(torch.equal(one, full[name]) for name, one in other.state_dict().items())


def test_save_pretrained(tmp_path: Path) -> None:
    """The files are those of the plain model, several and an index included."""
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "plain", max_shard_size="4KB")

    def on_rank(mesh: Any) -> None:
        laid: Any = weft.distribute_module(
            copy.deepcopy(model), mesh, shardings={"*.weight": P("x")})
        laid.save_pretrained(tmp_path / "joint", max_shard_size="4KB")

    weft.testing.run(on_rank, mesh={"x": 3})
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "joint").iterdir())
    for name in names:
        ours, theirs = ((tmp_path / at / name).read_bytes() for at in ("joint", "plain"))
        assert (ours == theirs) if name.endswith("safetensors") else (
            json.loads(ours) == json.loads(theirs))
