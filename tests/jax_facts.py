"""What JAX says of shardings and device orders: facts, one JSON object a line.

`python -m tests.jax_facts` prints the facts that stand in tests/pure/jax_facts.jsonl, `--all` all
that the optional test compares, `--read` reads op-sharding strings from stdin and prints the tiles
and devices that XLA finds in them. It needs jax (0.10.2 made the file), on CPU alone.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # type: ignore[import-not-found]
import numpy as np
from jax._src import mesh_utils  # type: ignore[import-not-found]
from jax._src.lib import xla_client  # type: ignore[import-not-found]

from tests.pure.test_core_layout import orders

MESHES = [(2,), (5,), (8,), (2, 4), (4, 2), (3, 2), (2, 1), (2, 2, 2), (2, 1, 3), (1, 4, 2)]
TORI = [(4, 4), (8,), (2, 3, 4), (6, 4), (2, 2, 2, 2), (4, 1, 4), (12, 2), (3, 3, 2), (4, 4, 4),
        (4, 4, 8)]
SHAPE = (120, 240)
"""Which every mesh here divides, as JAX wants it."""


def sharding(sizes: Sequence[int], devices: Sequence[int] | None, dims: Any) -> dict[str, Any]:
    """The op-sharding of a 2-D tensor whose dims are cut by these axes, and every device's box."""
    count = math.prod(sizes)
    all_devices = np.array(jax.devices())
    order = list(range(count)) if devices is None else list(devices)
    mesh = jax.sharding.Mesh(
        all_devices[order].reshape(sizes), [f"a{axis}" for axis in range(len(sizes))]
    )
    spec = [tuple(f"a{axis}" for axis in axes) or None for axes in dims]
    found = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    op = found._to_xla_hlo_sharding(2)
    boxes = {
        device.id: [list(part.indices(length)[:2]) for part, length in zip(index, SHAPE)]
        for device, index in found.devices_indices_map(SHAPE).items()
    }
    return {
        "kind": "sharding", "sizes": sizes, "devices": devices, "dims": dims, "text": repr(op),
        "order": list(op.tile_assignment_devices()),
        "boxes": [boxes[device] for device in sorted(boxes)],
    }


def torus(physical: Sequence[int], logical: Sequence[int], split: bool) -> dict[str, Any]:
    """The order of a torus's devices in a logical mesh; None where JAX finds none."""
    devices = np.arange(math.prod(physical)).reshape(physical)
    try:
        placed, _ = mesh_utils._create_device_mesh_for_nd_torus(
            devices, logical, allow_split_physical_axes=split
        )
        order = placed.reshape(-1).tolist()
    except NotImplementedError:
        order = None
    return {"kind": "torus", "physical": physical, "logical": logical, "split": split,
            "order": order}


class _Device:
    platform, device_kind, process_index = "gpu", "none", 0

    def __init__(self, number: int, slice_index: int) -> None:
        self.id, self.slice_index = number, slice_index


def hybrid(fast: Sequence[int], slow: Sequence[int]) -> dict[str, Any]:
    """The order of devices over two networks, fast within slices, slow between them."""
    inner = math.prod(fast)
    devices = [_Device(n, n // inner) for n in range(inner * math.prod(slow))]
    placed = mesh_utils.create_hybrid_device_mesh(fast, slow, devices)
    return {"kind": "hybrid", "fast": fast, "slow": slow,
            "order": [device.id for device in placed.reshape(-1)]}


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorizations(number // first, count - 1):
                yield first, *rest


def shardings() -> Iterator[dict[str, Any]]:
    chance = random.Random(0)
    for sizes in MESHES:
        for dims in orders(len(sizes)):
            yield sharding(sizes, None, dims)
            yield sharding(sizes, chance.sample(range(8), math.prod(sizes)), dims)


def tori() -> Iterator[dict[str, Any]]:
    chance = random.Random(1)
    for physical in TORI:
        for count in (1, 2, 3, 4):
            found = list(factorizations(math.prod(physical), count))
            for logical in chance.sample(found, min(60, len(found))):
                for split in (False, True):
                    yield torus(physical, logical, split)


def hybrids() -> Iterator[dict[str, Any]]:
    for fast, slow in itertools.product([(2, 2), (4, 1), (1, 3), (2, 4)], [(2, 1), (1, 2), (2, 2)]):
        yield hybrid(fast, slow)


def main(asked: list[str]) -> None:
    if asked == ["--read"]:
        for line in sys.stdin:
            op = xla_client.HloSharding.from_string(line.strip())
            print(json.dumps({
                "tiles": list(op.tile_assignment_dimensions()),
                "order": list(op.tile_assignment_devices()),
                "replicates": op.replicate_on_last_tile_dim(),
            }))
        return
    every = asked == ["--all"]
    print(json.dumps({"kind": "jax", "version": jax.__version__}))
    for made, step in ((shardings(), 11), (tori(), 37), (hybrids(), 1)):
        for fact in itertools.islice(made, 0, None, 1 if every else step):
            if every or len(fact["order"] or ()) <= 24:
                print(json.dumps(fact))


if __name__ == "__main__":
    main(sys.argv[1:])
