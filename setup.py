"""What pyproject.toml cannot say: the one part of weft in C, and what is installed with it.

Without a compiler weft is built without it, and numpy gives the same random numbers more slowly.
"""

import shutil
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


setup(
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
