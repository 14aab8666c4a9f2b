"""The optional compiled helper; everything else about the package stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ddpx._native",
            ["ddpx/_native.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-std=gnu11"],
            optional=True,  # without a compiler, plans run through torch calls instead
        )
    ]
)
