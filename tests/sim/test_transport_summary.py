"""`log.summary()` adds up what moved."""

from __future__ import annotations

import os

from weft.transport.traffic import Event, Log


def event(op: str, line: str, axes: tuple[str, ...], nbytes: int) -> Event:
    return Event(op, line, "S(0)->I", axes, "AllGather", nbytes, "forward", "")


def test_totals_by_axis_op_and_line() -> None:
    here, far = f"{os.getcwd()}{os.sep}train.py:3", "/far/" + "x" * 60 + ".py:12"
    log = Log([event("mm", here, ("dp",), 400), event("mm", here, ("dp", "tp"), 12_599_600),
               event("add", far, ("dp",), 1_000)])
    text = log.summary()
    assert text.splitlines() == [
        "3 collectives, 12.6 MB received",
        "by axis",
        f"  {'dp,tp':50}         1       12.6 MB",
        f"  {'dp':50}         2        1.4 kB",
        "by op",
        f"  {'mm':50}         2       12.6 MB",
        f"  {'add':50}         1          1 kB",
        "by line",
        f"  {'train.py:3':50}         2       12.6 MB",
        f"  ...{far[-47:]}         1          1 kB",
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_an_empty_log_and_the_units() -> None:
    assert Log().summary().splitlines()[0] == "0 collectives, 0 bytes received"
    sizes = {999: "999 bytes", 999_999: "1 MB", 215_000_000_000: "215 GB"}
    for nbytes, shown in sizes.items():
        assert f" {shown} received" in Log([event("op", "", (), nbytes)]).summary()
