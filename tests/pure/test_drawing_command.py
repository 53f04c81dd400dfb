"""`weft show` and `weft plan`, without processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from weft.cli.main import main
from weft.core import Layout, Mesh, P
from weft.drawing import show
from weft.drawing.one_rank import rank_lines
from weft.planner import plan

MESH = Mesh({"dp": 2, "tp": 4})
LAYOUT = Layout(MESH, (1024, 4096), P("dp", "tp"))
OTHER = Layout(MESH, (1024, 4096), P("tp", "dp"))
SHOW = ("show", "--mesh", "dp=2,tp=4")
PLAN = ("plan", "--mesh", "dp=2,tp=4")


def weft(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "80", **environment})


@pytest.mark.parametrize("arguments", [
    ("--shape", "1024,4096", "--spec", "P(dp,tp)"),
    ("--shape", "1024,4096", "--spec", "[Shard(0), Shard(1)]"),
    ("--shape", "1024,4096", "--spec", "{devices=[2,4]<=[8]}"),
    ("[1024@dp, 4096@tp]",),
    ("--spec", "[1024@dp, 4096@tp]"),
], ids=["spec", "placements", "op-sharding", "own text", "own text as spec"])
def test_show_in_every_spelling(arguments: tuple[str, ...]):
    result = weft(*SHOW, *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{show(LAYOUT)}\n"


def test_show_sizes_ranks_and_dtype():
    layout = Layout(Mesh((4,), ranks=range(8, 12)), (20,), P(0), sizes={0: (6, 3, 4, 7)})
    result = weft("show", "--mesh", "4", "--ranks", "8-11", "--shape", "20", "--spec", "P(0)",
                  "--sizes", "0=6,3,4,7", "--dtype", "f32")
    assert result.stdout == f"{show(layout, dtype='float32')}\n"
    assert weft(*SHOW, "bf16[8]").stdout.startswith("bf16[8] on Mesh(dp=2, tp=4): 8 ranks\n")
    assert weft(*SHOW, "--shape", "8").stdout == f"{show(Layout(MESH, (8,)))}\n"


def test_show_is_as_wide_as_the_terminal():
    wide = weft(*SHOW, "[16@(dp,tp)]", COLUMNS="120").stdout
    assert wide == f"{show(Layout(MESH, (16,), P(('dp', 'tp'))), width=120)}\n"


def test_show_writes_files(tmp_path: Path):
    for name in ("a.svg", "a.txt"):
        result = weft(*SHOW, "[1024@dp, 4096@tp]", "--out", str(tmp_path / name))
        assert result.stdout == f"{show(LAYOUT)}\n\nWritten to {tmp_path / name}\n"
    assert (tmp_path / "a.svg").read_text() == show(LAYOUT).svg()
    assert (tmp_path / "a.txt").read_text() == f"{show(LAYOUT)}\n"


@pytest.mark.parametrize("layout", [
    Layout(MESH, (1024, 4096), P("dp", partial={"tp": "sum"})),
    Layout(Mesh({"a": 256, "b": 256}), (65536, 65536), P("a", "b")),
], ids=["terms", "many"])
def test_show_writes_png(tmp_path: Path, layout: Layout):
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "a.png"
    axes = ",".join(f"{name}={layout.mesh.size(name)}" for name in layout.mesh.axis_names)
    result = weft("show", "--mesh", axes, str(layout), "--out", str(file))
    assert result.exit_code == 0, result.output
    pixels = image.imread(file)
    scene = show(layout).scene
    assert pixels.shape[:2] == (pytest.approx(2 * scene.height, abs=2),
                                pytest.approx(2 * scene.width, abs=2))
    # Every block's colour is there.
    for mark in scene.marks:
        if fill := getattr(mark, "fill", None):
            wanted = [int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]
            assert (abs(pixels[:, :, :3] - wanted).max(axis=2) < 0.01).any(), fill


def test_png_without_matplotlib_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "a.png"
    result = weft(*SHOW, "[8@dp]", "--out", str(file))
    assert result.exit_code == 2 and not file.exists()
    assert result.stderr == (
        f"--out {file}: .png files are drawn by matplotlib, which cannot be imported (import of "
        "matplotlib.figure halted; None in sys.modules).\n"
        "  Rule: weft itself needs no matplotlib; the commands that draw pixels do.\n"
        f"  Offenders: {file}\n"
        f"  Fix: pip install matplotlib; or --out {file.with_suffix('.svg')}, which weft writes "
        "by itself where a command offers it\n"
    )


def test_a_terminal_sees_colours(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("rich")
    shown = weft(*SHOW, "[8@dp]", FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm").stdout
    assert "\x1b[38;2;0;0;0;48;2;" in shown
    plain = weft(*SHOW, "[8@dp]").stdout
    assert "\x1b" not in plain
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert weft(*SHOW, "[8@dp]", FORCE_COLOR="1").stdout == plain


def test_plan():
    result = weft(*PLAN, "--shape", "1024,4096", "--from", "P(dp,tp)", "--to", "P(tp,dp)")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{show(plan(LAYOUT, OTHER))}\n"
    wide = weft(*PLAN, "--from", "[1024@dp, 4096@tp]", "--to", "[Shard(1), Shard(0)]",
                COLUMNS="120")
    assert wide.stdout == f"{show(plan(LAYOUT, OTHER), width=120)}\n"


def test_plan_of_a_dtype_for_one_rank():
    result = weft(*PLAN, "--shape", "1024,4096", "--from", "P(dp,tp)", "--to", "P(tp,dp)",
                  "--dtype", "bf16", "--rank", "3", "--no-draw")
    made = plan(LAYOUT, OTHER, itemsize=2)
    assert result.stdout == "\n".join([str(made), "", *rank_lines(made, 3), ""])


def test_plan_with_sizes(tmp_path: Path):
    result = weft(*PLAN, "--shape", "20", "--from", "P(tp)", "--to", "P(dp)", "--from-sizes",
                  "0=6,3,4,7", "--to-sizes", "0=balanced", "--no-draw", "--out",
                  str(tmp_path / "a.svg"))
    made = plan(Layout(MESH, (20,), P("tp"), sizes={0: (6, 3, 4, 7)}), Layout(MESH, (20,), P("dp")))
    assert result.stdout == f"{made}\n\nWritten to {tmp_path / 'a.svg'}\n"
    assert (tmp_path / "a.svg").read_text() == show(made).svg()


def test_plan_to_another_mesh():
    result = weft(*PLAN, "--from", "[1024@dp, 4096@tp]", "--to", "P(x)", "--to-mesh", "x=8",
                  "--to-ranks", "4-11", "--rank", "9")
    made = plan(LAYOUT, Layout(Mesh({"x": 8}, ranks=range(4, 12)), (1024, 4096), P("x")))
    assert result.stdout == "\n".join([show(made), "", *rank_lines(made, 9), ""])
    moved = weft(*PLAN, "--from", "[1024@dp, 4096@tp]", "--to", "P(dp,tp)", "--to-ranks", "8-15",
                 "--no-draw")
    there = Layout(Mesh({"dp": 2, "tp": 4}, ranks=range(8, 16)), (1024, 4096), P("dp", "tp"))
    assert moved.stdout == f"{plan(LAYOUT, there)}\n"


SPELLINGS = ("  Rule: it is written as weft prints it: a spec P(dp, None, (tp,sp), "
             "partial={cp: sum}), placements [Shard(0), Replicate(), Partial(sum)], or a layout's "
             "text [8@dp, 16@(tp,sp)] partial(sum@cp).\n")

REFUSED: dict[tuple[str, ...], str] = {
    (*SHOW, "--shape", "8,8", "--spec", "P(dp tp)"):
        "--spec: 'P(dp tp)' cannot be read: 'tp' stands at character 6, where ',' or ')' is due.\n"
        + SPELLINGS + "  Offenders: 'P(dp tp)'\n  Fix: --spec 'P(dp,tp)'\n",
    (*SHOW, "--spec", "P(dp)"):
        "--spec: 'P(dp)' has no shape, and none is given.\n"
        "  Rule: a spec says which axes shard, so it needs a global shape; a layout's own text has "
        "one.\n  Offenders: P(dp)\n  Fix: --shape 1024,4096 --spec 'P(dp)'\n",
    (*SHOW, "--shape", "8,8", "--spec", "P(dp,up)"):
        "--spec P('dp', 'up'): 1 of 2 names fit none of the 2 axes of "
        "Mesh(dp=2, tp=4).\n  Rule: an axis is named as the mesh names it, or by its number.\n"
        "  Offenders: 'up'\n  Fix: one of 'dp', 'tp'\n",
    ("show", "--mesh", "dp:2", "[8]"):
        "--mesh: 'dp:2' has 1 of 1 parts that are no axis.\n  Rule: a mesh is written as "
        "name=size, separated by commas, or as sizes alone.\n  Offenders: 'dp:2'\n  Fix: dp=2\n",
    (*SHOW, "[8@dp] partial(avg@tp)", "--dtype", "int64"):
        "[8@dp] partial(avg@tp): 1 partial axes cannot carry int64.\n  Rule: avg is for floats and "
        "complex, max and min for all but complex, band, bor and bxor for integers and bools, and "
        "and or for bools.\n  Offenders: avg@tp\n  Fix: Partial(\"sum\") carries every dtype; or "
        "convert the tensor first\n",
    (*SHOW, "[8@dp]", "--out", "a.pdf"):
        "--out a.pdf: 'a.pdf' ends in '.pdf'.\n  Rule: a drawing is written as .svg, .png or "
        ".txt.\n  Offenders: a.pdf\n  Fix: --out a.svg\n",
    (*SHOW, "[8@dp]", "--out", "no where/a.svg"):
        "--out no where/a.svg: there is no folder 'no where'.\n  Rule: a file is written into a "
        "folder that is there.\n  Offenders: no where\n  Fix: mkdir -p 'no where'\n",
    (*SHOW, "--shape", "8", "--spec", "P(dp)", "--sizes", "3,5"):
        "--sizes: 1 of 1 texts give no sizes of a dim of their own.\n  Rule: sizes are written as "
        "dim=size,size,... in shard order, or dim=balanced, dim=flat; each dim once.\n"
        "  Offenders: '3,5'\n  Fix: 0=3,5\n",
    (*PLAN, "--from", "[8@dp]", "--to", "P(tp)", "--rank", "8"):
        "--rank: rank 8 is not among those of Mesh(dp=2, tp=4): 8 ranks.\n"
        "  Rule: only a rank of a mesh takes part.\n  Offenders: 8\n  Fix: --rank 0\n",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_mistakes_are_explained(arguments: tuple[str, ...]):
    result = weft(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == REFUSED[arguments]


def test_the_layout_is_said_once():
    result = weft(*SHOW, "[8@dp]", "--spec", "P(dp)")
    assert result.exit_code == 2 and "both say the layout" in result.stderr


def test_help_lists_the_commands_without_importing_the_demo():
    output = " ".join(weft("--help").output.split())
    for line in ("demo Train one transformer", "plan Plan the way", "show Draw a layout"):
        assert line in output
    assert weft("demo", "--help").exit_code == 0


def test_a_shell_completes_commands_whose_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    given = {"_WEFT_COMPLETE": "bash_complete", "COMP_WORDS": "weft demo --", "COMP_CWORD": "2"}
    done = CliRunner().invoke(main, [], env=given, prog_name="weft")
    assert done.exit_code == 0 and done.exception is None
    refused = CliRunner().invoke(main, ["demo"])
    assert refused.exit_code == 1 and "pip install rich matplotlib" in refused.output
