"""Lets Dataflow's `--setup_file` and old tools build the package, and has the one part that is compiled.

Everything else is in pyproject.toml. Without a C compiler the package is built without that part: Pillow does its work.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "beam_pipeline.images._resample",
            ["beam_pipeline/images/resample.c"],
            extra_compile_args=["-O3", "-g0"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for Python 3.11 and later
)
