"""The optional compiled helper; everything else about the package stands in pyproject.toml."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = Path(__file__).with_name("ddpx") / "_native.c"

setup(
    ext_modules=[
        Extension(
            "ddpx._native",
            ["ddpx/_native.c"],
            define_macros=[("DDPX_SOURCE", f"{zlib.crc32(SOURCE.read_bytes())}u")],  # see ddpx/compiled.py
            extra_compile_args=["-O3", "-ffp-contract=off", "-std=gnu11"],
            optional=True,  # without a compiler, plans run through torch calls instead
        )
    ]
)
