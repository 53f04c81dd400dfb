"""What `import weft` brings: names when asked for, all of weft as soon as torch is there."""

from __future__ import annotations

import ast
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft import startup
from weft.core.counterparts import ATTRIBUTES

FRONT = Path(weft.__file__)

PURE = "KINDS, Layout, Link, Links, Mesh, MeshError, P, Partial, Shard, plan, set_links, show"


def run(code: str) -> str:
    """What a fresh process prints. It takes seconds where torch is imported."""
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True,
                          text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("code", [
    "import weft; assert 'weft.core' not in sys.modules",
    f"from weft import {PURE}",
    "import weft; print(weft.plan, weft.errors, weft.network.Links, dir(weft))",
    "import weft; assert not hasattr(weft, 'nothing')",
    "import pickle; pickle.loads(b'cweft.core.layout\\nLayout\\n.')",
    "import runpy; sys.argv = ['weft', 'show', '--mesh', 'dp=2', '[8@dp]']\n"
    "try: runpy.run_module('weft', run_name='__main__')\n"
    "except SystemExit as end: assert end.code == 0",
    "import runpy; sys.argv = ['weft', 'plan', '--mesh', 'dp=2', '--from', '[8@dp]', '--to', 'P()']"
    "\ntry: runpy.run_module('weft', run_name='__main__')\n"
    "except SystemExit as end: assert end.code == 0",
], ids=["weft", "names", "attributes", "no name", "pickle", "weft show", "weft plan"])
def test_layouts_and_their_commands_load_little(code: str) -> None:
    # Each of the standard library's takes as long as a room of weft, or longer.
    heavy = {"torch", "numpy", "rich", "matplotlib", "html", "shutil", "pathlib", "asyncio"}
    came = f"print({heavy} & (set(sys.modules) - before))"
    assert run(f"before = set(sys.modules)\n{code}\n{came}").endswith("set()")


@pytest.mark.parametrize("code", [
    "import weft, torch",
    "import torch, weft",
    "import weft.nn",
    "import pickle; pickle.loads(b'cweft.tensor.shard_tensor\\nShardTensor\\n.')",
])
def test_with_torch_comes_all_that_changes_torch(code: str) -> None:
    # torch.manual_seed seeds weft's stream, and torch.load may read ShardTensors.
    missing = f"[each for each in {startup.WITH_TORCH} if f'weft.{{each}}' not in sys.modules]"
    said = run(f"""{code}
import torch
print({missing}, [each for each in sys.meta_path if type(each).__module__ == "weft.startup"])
torch.manual_seed(7)
import weft
print(weft.random.rng_state() == (weft.manual_seed(7), weft.rng_state())[1])
safe = [each.__module__ for each in torch.serialization.get_safe_globals()]
print("weft.tensor.placing.saved" in safe, type(torch.__spec__.loader))
""")
    loader = "<class '_frozen_importlib_external.SourceFileLoader'>"
    assert said.splitlines() == ["[] []", "True", f"True {loader}"]


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    done = subprocess.run([sys.executable, "-c", "import weft; weft.plam"], capture_output=True,
                          text=True, timeout=100, check=False)
    assert done.stderr.endswith("has no attribute 'plam'. Did you mean: 'plan'?\n")


def test_a_name_of_another_library_has_its_counterpart() -> None:
    told = "module 'weft' has no attribute 'PartitionSpec'; in its place: weft.P"
    with pytest.raises(ImportError) as imported:
        exec("from weft import PartitionSpec")
    with pytest.raises(AttributeError) as asked:
        weft.PartitionSpec  # noqa: B018
    assert (str(imported.value), str(asked.value)) == (told, told)
    assert not hasattr(weft, "PartitionSpec")
    with pytest.raises(ImportError, match=r"^cannot import name 'nothing' from 'weft'"):
        exec("from weft import nothing")


def test_help_and_inspect() -> None:
    page = pydoc.render_doc(weft, renderer=pydoc.plaintext)
    assert "PACKAGE CONTENTS" in page and "class Layout(" in page and "manual_seed(seed" in page
    members = dict(inspect.getmembers(weft))
    assert members["ShardTensor"] is weft.ShardTensor and members["nn"] is weft.nn
    assert pickle.loads(pickle.dumps(weft.show)) is weft.show


def test_help_says_what_is_wefts_own() -> None:
    """A ShardTensor inherits hundreds of texts from torch.Tensor, and KINDS those of a tuple."""
    *owners, plain, _, _ = weft.ShardTensor.__mro__
    own = {name for owner in owners for name in vars(owner)
           if not name.startswith("_") and not hasattr(plain, name)} - set(ATTRIBUTES)
    assert {"redistribute", "sharding", "to_local"} < own
    said = weft.ShardTensor.__doc__ or ""
    assert [name for name in sorted(own) if not re.search(rf"\b{name}\b", said)] == []
    kinds = pydoc.render_doc(weft.KINDS, renderer=pydoc.plaintext)
    assert kinds.rstrip().endswith("The kinds of reduction that a partial axis may have.")
    assert "bxor" in kinds and pickle.loads(pickle.dumps(weft.KINDS)) == weft.KINDS


def test_threads_import_at_once() -> None:
    assert run("""
import importlib, threading
rooms = ["weft.nn", "weft.spmd", "torch", "weft.interop", "weft.random"]
threads = [threading.Thread(target=importlib.import_module, args=(each,)) for each in rooms]
[each.start() for each in threads]
[each.join() for each in threads]
import weft
print(weft.ShardTensor.__name__, weft.nn.report.__name__)""") == "ShardTensor report"


def test_torch_part_can_wait_while_another_import_fails() -> None:
    assert run("""
import weft
sys.modules["numpy"] = None
try: import weft.spmd
except ImportError: pass
del sys.modules["numpy"]
import weft.spmd
print(weft.ShardTensor.__name__, "weft.interop" in sys.modules)""") == "ShardTensor True"


def test_dir_shows_the_public_names() -> None:
    shown = [name for name in dir(weft) if not name.startswith("__")]
    assert shown == sorted({*weft.__all__, "network", "nn", "random", "ray", "spmd", "testing"})
    assert {"__all__", "__version__", "__doc__"} <= set(dir(weft))
    for name in shown:
        assert getattr(weft, name) is not None


def test_type_checkers_see_the_public_names() -> None:
    block = next(node for node in ast.parse(FRONT.read_text()).body
                 if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    names = {each.name for node in block.body if isinstance(node, ast.ImportFrom)
             for each in node.names}
    assert names == {*weft.__all__, "network", "nn", "random", "ray"}


def test_every_public_name_comes_from_one_room() -> None:
    for name in set(weft.__all__) - {"spmd", "testing"}:
        value = getattr(weft, name)
        rooms = [getattr(weft, room) for room in
                 ("errors", "core", "planner", "drawing", *startup.WITH_TORCH)
                 if room != "spmd" or name == "ShardedLoader"]  # its Mesh is torch_xla's
        having = [getattr(room, name) for room in rooms if name in room.__all__]
        assert having and all(each is value for each in having), name


def test_show_stays_the_function() -> None:
    assert run("import weft, weft.drawing.svg, weft.drawing; print(callable(weft.show), "
               "weft.show.__module__)") == "True weft.drawing.drawing"


def test_names_of_a_theme_stand_together() -> None:
    assert weft.random.__all__ == ["fork_rng", "manual_seed", "rng_state", "set_rng_state"]
    assert weft.network.__all__ == ["Link", "Links", "measure_links", "set_links"]
    for room in (weft.random, weft.network):
        for name in room.__all__:
            assert getattr(room, name) is getattr(weft, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'weft' has no attribute 'other_tensor'$"):
        _ = weft.other_tensor
    with pytest.raises(AttributeError, match="measure"):
        _ = weft.network.measure
    with pytest.raises(ImportError, match="cannot import name 'other_tensor' from 'weft'"):
        exec("from weft import other_tensor")


UNEXPLAINED = {"ShardTensor", "BoundMesh", "OpSharding", "LocalShard", "PerRank", "Report",
               "ShardingType", "wrap_if_sharded"}
"""What users do not call themselves, and what takes anything."""


def test_public_functions_explain_their_arguments() -> None:
    rooms = (weft, weft.nn, weft.spmd, weft.testing, weft.collectives, weft.random, weft.network)
    public = {getattr(room, name) for room in rooms for name in room.__all__
              if name not in UNEXPLAINED and callable(getattr(room, name))}
    errors = {each for each in public if isinstance(each, type) and issubclass(each, Exception)}
    assert not [each.__name__ for each in public - errors
                if inspect.signature(each).parameters and "Args:" not in (each.__doc__ or "")]


def test_a_start_looks_for_no_garbage_and_what_follows_does() -> None:
    said = run("""
import gc, sys
from weft.__main__ import main
looked = []
gc.callbacks.append(lambda phase, _: looked.append(phase))
sys.argv = ["weft", "show", "--mesh", "a=2", "--shape", "4", "P(a)"]
try:
    main()
except SystemExit:
    pass
print(len(looked), gc.isenabled(), gc.get_freeze_count() > 1000)
""")
    count, *rest = said.splitlines()[-1].split()
    assert int(count) < 10 and rest == ["True", "True"], said
