"""Devices by name: how fast they compute, and how much memory they have."""

from __future__ import annotations

from dataclasses import dataclass

from weft.dry.compute import Compute
from weft.errors import ShardTypeError

__all__ = ["DEVICES", "Device", "device_named"]


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device. The network between such devices has the same name in `weft.Links`.

    Args:
        name: the name in texts.
        compute: its rates.
        nbytes: bytes of its memory.
    """

    name: str
    compute: Compute
    nbytes: int


DEVICES = {
    name: Device(name, Compute(flops, memory, 5e-6), nbytes * 10**9)
    for name, flops, memory, nbytes in (
        ("a100", 312e12, 2.0e12, 80), ("h100", 989e12, 3.35e12, 80), ("b200", 2.25e15, 8e12, 180),
        ("gb200", 2.5e15, 8e12, 186))
}
"""By NVIDIA's data sheets of A100 80GB, H100 SXM, HGX B200 and GB200 NVL72: dense products in
bfloat16, and the bandwidth and size of the memory. These are peaks: training reaches about half of
the arithmetic. 5 us for a call is an order of magnitude."""


def device_named(name: str | None) -> Device | None:
    """The device of this name; None for None."""
    if name is not None and name not in DEVICES:
        raise ShardTypeError(
            "dry_run(device)", f"{name!r} is no device",
            f"a device is one of {', '.join(DEVICES)}", [name],
            'device="h100", or links= and compute= with figures of your own')
    return None if name is None else DEVICES[name]
