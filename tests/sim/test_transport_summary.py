"""`log.summary()` adds up what moved."""

from __future__ import annotations

import os
from dataclasses import replace

from weft.core.units import nbytes_text
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
        f"  {'dp,tp':46}        1     12.6 MB",
        f"  {'dp':46}        2      1.4 kB",
        "by collective",
        f"  {'AllGather':46}        3     12.6 MB",
        "by op",
        f"  {'mm':46}        2     12.6 MB",
        f"  {'add':46}        1        1 kB",
        "by line",
        f"  {'train.py:3':46}        2     12.6 MB",
        f"  ...{far[-43:]}        1        1 kB",
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_modules_seconds_and_many_rows() -> None:
    log = Log([
        replace(event("mm", "", ("dp",), 10**at), module=f"layer{at}", seconds=215e-6)
        for at in range(20)
    ])
    lines = log.summary(rows=3).splitlines()
    assert lines[0] == f"20 collectives, {nbytes_text(log.nbytes)} received, 4.3 ms"
    at = lines.index("by module")
    assert lines[at + 1].split() == ["layer19", "1", "10", "EB", "215", "us"]
    assert lines[at + 3].split()[:4] == ["18", "others", "18", "111"]
    assert len(log.summary(rows=None).splitlines()) > 20 and max(map(len, lines)) <= 80
    head, first, *_ = str(log).splitlines()
    assert head.split()[1] == "module" and "215 us" in first
    assert str(log).splitlines()[-1].startswith("S: sharded")


def test_layers_of_a_stack_count_as_one_where_rows_are_few() -> None:
    log = Log([
        replace(event(f"parameters of model.layers.{at}", "", ("dp",), 100),
                module=f"model.layers.{at}.up")
        for at in range(20)
    ])
    lines = [line.split() for line in log.summary(rows=3).splitlines()]
    assert ["parameters", "of", "model.layers.*", "20", "2", "kB"] in lines
    assert ["model.layers.*.up", "20", "2", "kB"] in lines
    assert "model.layers.19.up" in log.summary(rows=20)


def test_an_empty_log_and_the_units() -> None:
    assert Log().summary().splitlines()[0] == "0 collectives, 0 bytes received"
    sizes = {999: "999 bytes", 999_999: "1 MB", 215_000_000_000: "215 GB"}
    for nbytes, shown in sizes.items():
        assert f" {shown} received" in Log([event("op", "", (), nbytes)]).summary()
