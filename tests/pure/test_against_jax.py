"""Op-shardings, the boxes of devices, and device orders, against JAX.

Facts of JAX 0.10.2 stand in jax_facts.jsonl. Where jax is installed, they are asked for again and
compared in full, and XLA reads what weft writes: `pip install "jax[cpu]"` into the environment, or
a directory that has it on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft import Layout, MeshError
from weft.core import Mesh
from weft.core.torus import assign, devices_in_order, in_blocks

REPOSITORY = Path(__file__).parents[2]
FACTS = Path(__file__).parent / "jax_facts.jsonl"
PINNED = [json.loads(line) for line in FACTS.read_text().splitlines()]
SHAPE = (120, 240)

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed"
)


def layout_of(fact: Any, own_devices: bool) -> Layout:
    axes = [(f"a{axis}", size) for axis, size in enumerate(fact["sizes"])]
    return Layout.make(Mesh(axes, fact["devices"] if own_devices else None), SHAPE, fact["dims"])


def judge(fact: Any) -> list[str]:
    """What of a fact weft says otherwise.

    JAX keeps a mesh's own order of devices apart from the op-sharding, which counts places in the
    mesh; weft's string, as torch_xla's, names the devices themselves.
    """
    match fact["kind"]:
        case "sharding":
            counted, own = layout_of(fact, False), layout_of(fact, True)
            devices = fact["devices"] or range(counted.mesh.size())
            boxes = [[list(part) for part in own.box(rank)] for rank in sorted(devices)]
            found = {
                "text": (counted.hlo_sharding(), fact["text"]), "boxes": (boxes, fact["boxes"]),
            }
            if fact["order"]:
                tiles = own.tile_assignment
                found["order"] = list(tiles.devices), [devices[at] for at in fact["order"]]
        case "torus":
            try:
                shares = assign(fact["physical"], fact["logical"], fact["split"])
                order = devices_in_order(fact["physical"], shares)
            except MeshError:
                order = None
            found = {"order": (order, fact["order"])}
        case "hybrid":
            inner = fact["fast"][0] * fact["fast"][1]
            blocks = in_blocks(fact["fast"], fact["slow"])
            order = [block * inner + place for block, place in blocks]
            found = {"order": (order, fact["order"])}
        case _:
            return []
    return [f"{what}: {ours}, not {theirs}" for what, (ours, theirs) in found.items()
            if ours != theirs]


def test_the_pinned_facts() -> None:
    assert PINNED[0] == {"kind": "jax", "version": "0.10.2"}
    kinds = [fact["kind"] for fact in PINNED]
    assert all(kinds.count(kind) >= least for kind, least in (
        ("sharding", 30), ("torus", 30), ("hybrid", 6)))
    assert [(fact, wrong) for fact in PINNED if (wrong := judge(fact))] == []


def test_the_judge_notices() -> None:
    """Another axis order, another device order, another torus: each is told."""
    sharding = next(fact for fact in PINNED if fact.get("sizes") == [2, 4] and fact["dims"][0])
    assert judge(sharding) == []
    swapped = {**sharding, "dims": sharding["dims"][::-1]}
    assert [line.split(":")[0] for line in judge(swapped)] == ["text", "boxes"]
    listed = {**sharding, "order": sharding["order"][::-1]}
    assert [line.split(":")[0] for line in judge(listed)] == ["order"]
    turned = {**sharding, "devices": [*range(1, 8), 0]}
    assert "boxes" in [line.split(":")[0] for line in judge(turned)]
    torus = next(fact for fact in PINNED if fact["kind"] == "torus" and fact["order"])
    assert judge({**torus, "order": torus["order"][::-1]}) != []


def _jax(*asked: str, given: str = "") -> list[Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.jax_facts", *asked], cwd=REPOSITORY, input=given,
        env=os.environ, capture_output=True, text=True, timeout=150, check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@needs_jax
def test_all_that_jax_says() -> None:
    facts = _jax("--all")
    assert len(facts) > 1500
    assert [(fact, wrong) for fact in facts if (wrong := judge(fact))] == []
    told = {json.dumps(fact) for fact in facts}
    assert [fact for fact in PINNED[1:] if json.dumps(fact) not in told] == []


@needs_jax
def test_xla_reads_what_weft_writes() -> None:
    layouts = [layout_of(fact, False) for fact in PINNED if fact["kind"] == "sharding"]
    layouts = [layout for layout in layouts if layout.hlo_sharding() != "{replicated}"]
    for version in (1, 2):
        texts = "\n".join(layout.hlo_sharding(version) for layout in layouts)
        for layout, read in zip(layouts, _jax("--read", given=texts), strict=True):
            ours = layout.tile_assignment
            last = [ours.num_replicas] if ours.num_replicas > 1 else []
            assert read == {"tiles": [*ours.tiles, *last], "order": list(ours.devices),
                            "replicates": bool(last)}
