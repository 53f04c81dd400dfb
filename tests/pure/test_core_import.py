"""core stands on the standard library alone, and travels between processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from weft.core import Layout, Mesh, P

SOURCES = Path(__file__).parents[2] / "src"

_ALONE = f"""
import sys, time
sys.path.insert(0, {str(SOURCES)!r})
start = time.process_time()
import contextlib, dataclasses, inspect, re, typing
below = time.process_time()
import weft.core
took = (time.process_time() - below) / (below - start)
"""


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-S", "-c", _ALONE + code], env=environment, check=True,
        capture_output=True, text=True, timeout=60,
    )
    return done.stdout.strip()


def test_core_imports_the_standard_library_only():
    foreign = _run("""
print([name for name in sys.modules
       if name.split(".")[0] not in {*sys.stdlib_module_names, "weft", "__main__"}])""")
    assert foreign == "[]"


def test_core_imports_in_milliseconds():
    # 8 ms on a quiet machine, after 20 for the standard library's part, which is the measure here.
    assert min(float(_run("print(took)")) for _ in range(4)) < 0.8


def test_values_keep_their_identity_in_another_process():
    # Hashes of text differ from process to process; a stored one must not travel.
    layout = Layout(Mesh({"dp": 2, "tp": 2}), (7, 5), P("dp", partial={"tp": "sum"}),
                    sizes={0: (1, 6)})
    data = pickle.dumps((layout, layout.mesh, layout.spec))
    answers = _run(f"""
import pickle
from weft.core import *
layout, mesh, spec = pickle.loads({data!r})
fresh = {layout!r}
print(layout == fresh, hash(layout) == hash(fresh), hash(mesh) == hash(fresh.mesh),
      {{fresh: 1}}[layout], spec == fresh.spec)""", PYTHONHASHSEED="12345")
    assert answers == "True True True 1 True"
