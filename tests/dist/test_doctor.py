"""`weft doctor` says what is there, and ends with 1 where ranks do not run."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from weft.cli import doctor as page
from weft.cli.launch import RanksFailed
from weft.cli.main import main


def test_what_is_installed_and_ranks_that_run() -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    found = {line.split()[1]: line for line in done.output.splitlines()}
    assert {"weft", "python", "torch", "backends", "devices", "random", "ranks"} <= set(found)
    assert re.search(r"2 run, their sum is right, \d+ MB/s, \d+ us", found["ranks"])


def test_ranks_that_fail_and_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RanksFailed("Traceback\nRuntimeError: no address\n")

    monkeypatch.setattr(page, "events", fail)
    monkeypatch.setattr(page, "_OPTIONAL", {"no_such_package": "a test"})
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert "2 do not run: RuntimeError: no address" in done.output
    assert "pip install no_such_package" in done.output


def test_a_wrong_sum_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"sum": 2.0, "us": 1.0, "mb_per_second": 7.0}
    monkeypatch.setattr(page, "events", lambda *_: [told])
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1 and "their sum is wrong, 7 MB/s, 1 us" in done.output
