"""The optional compiled helper; everything else about the package stands in pyproject.toml."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "ddpx" / "csrc").glob("*.[ch]"))

setup(
    ext_modules=[
        Extension(
            "ddpx._native",
            [str(path.relative_to(HERE)) for path in SOURCES if path.suffix == ".c"],
            depends=[str(path.relative_to(HERE)) for path in SOURCES],
            define_macros=[
                ("DDPX_SOURCE", f"{zlib.crc32(b''.join(map(Path.read_bytes, SOURCES)))}u")
            ],  # ddpx/compiled.py
            extra_compile_args=["-O3", "-ffp-contract=off", "-std=gnu11"],
            optional=True,  # without a compiler, plans run through torch calls instead
        )
    ]
)
