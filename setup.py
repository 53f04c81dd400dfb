"""What pyproject.toml cannot say: the one part of weft in C, what is installed with it, and the
README as a package index shows it.

Without a compiler weft is built without it, and numpy gives the same random numbers more slowly.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class BuildWithTools(build_py):
    """Copies the demo and the benchmarks to where `weft demo` and `weft bench` look for them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # then they are found in the repository
        for folder in (Path("examples/demo"), Path("bench")):
            target = Path(self.build_lib, "weft", "tools", folder.name)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))


def readme_of_index(folder: Path) -> str:
    """README with absolute links: an index shows it alone, without the files that it links."""
    home = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({home}/{view}/main/{link[3]})"

    relative = r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!\w+:|#)([^)\s]+)\)"
    code, page = r"(^```.*?^```$|`[^`\n]*`)", (folder / "README.md").read_text()
    parts = re.split(code, page, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("`") else re.sub(relative, absolute, part) for part in parts)


setup(
    long_description=readme_of_index(Path(__file__).parent),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithTools},
    ext_modules=[Extension(
        "weft.rng._lanes",
        ["src/weft/rng/_lanes.c"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        extra_compile_args=["-O3"],
        py_limited_api=True,
        optional=True,
    )],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
