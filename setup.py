"""The one part of weft in C; all else is in pyproject.toml.

Without a compiler weft is built without it, and numpy gives the same random numbers more slowly.
"""

from setuptools import Extension, setup

setup(
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
