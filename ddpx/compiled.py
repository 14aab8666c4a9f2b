"""The compiled helper that is built with the package, where a compiler was there. Everything works without it."""

import ctypes
import importlib.util
import warnings
import zlib
from pathlib import Path


def load() -> ctypes.CDLL | None:
    """The library built with the package, or None.

    In a checkout it may be older than its source, and would then read operations as they were: it is left alone.
    """
    spec = importlib.util.find_spec("ddpx._native")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    source = Path(__file__).with_name("_native.c")
    built_from = getattr(library, "ddpx_source", int)() & 0xFFFFFFFF
    if source.exists() and built_from != zlib.crc32(source.read_bytes()):
        warnings.warn(f"{spec.origin} was built from another {source.name}: install ddpx again", stacklevel=2)
        return None
    library.ddpx_run.restype = ctypes.c_int64
    library.ddpx_run.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    library.ddpx_shut.restype = None
    library.ddpx_shut.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    library.ddpx_cache_bytes.restype = ctypes.c_int64
    library.ddpx_cache_bytes.argtypes = ()
    return library


LIBRARY = load()
