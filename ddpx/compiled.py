"""The compiled helper that is built with the package, where a compiler was there. Everything works without it."""

import ctypes
import importlib.util
import warnings
import zlib
from ctypes import c_char_p, c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {  # what csrc/ offers beside what takes and returns an int
    "ddpx_run": (c_int64, (c_void_p, *[c_int64] * 2, *[c_uint64] * 2, *[c_int64] * 3, c_void_p)),
    "ddpx_shut": (None, (c_void_p, c_uint64)),
    "ddpx_cache_bytes": (c_int64, ()),
    "ddpx_mesh": (c_void_p, (c_int64,)),
    "ddpx_mesh_free": (None, (c_void_p,)),
    "ddpx_mesh_connect": (None, (c_void_p, c_int64, c_int)),
    "ddpx_mesh_label": (None, (c_void_p, c_uint64, c_uint64)),
    "ddpx_mesh_waits_for": (c_int64, (c_void_p,)),
    "ddpx_mesh_wrong": (ctypes.POINTER(c_uint64), (c_void_p,)),
    "ddpx_mesh_post": (c_uint64, (c_void_p, c_int64, c_void_p, c_uint64, c_int)),
    "ddpx_mesh_wait": (c_int64, (c_void_p, c_int64, c_int, c_uint64, c_int64, c_void_p)),
    "ddpx_mesh_run": (c_int64, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "ddpx_address_of": (c_int64, (c_char_p, c_char_p, c_int64)),
}


class Kind(IntEnum):
    """Of operations, as numbered in csrc/operations.h."""

    WAIT = 0
    PUBLISH = 1
    HOLD = 2
    CLAIM = 3
    RELEASE = 4
    COPY = 5
    SUM_F32 = 6
    SUM_F64 = 7
    SUM_BF16 = 8
    SUM_F16 = 9
    SEND = 10
    RECEIVE = 11
    SENT = 12
    RECEIVED = 13


class Encoded(ctypes.Structure):
    """An operation, laid out as in csrc/operations.h, which says what the fields are."""

    _fields_ = (
        ("kind", c_int64),
        ("count", c_int64),
        ("out", c_void_p),
        ("source", ctypes.POINTER(c_void_p)),
        ("sources", c_int64),
        ("peer", c_int64),
        ("header", c_void_p),
        ("also", ctypes.POINTER(c_void_p)),
        ("alsos", c_int64),
        ("past_caches", c_int64),
    )


class Outcome(ctypes.Structure):
    """How long a run waited for peers, and whom it waited for longest."""

    _fields_ = (("wait_ns", c_int64), ("longest_ns", c_int64), ("last_peer", c_int64))


def load() -> ctypes.CDLL | None:
    """The library built with the package, or None.

    In a checkout it may be older than its sources, and would then read operations as they were: it is left alone.
    """
    spec = importlib.util.find_spec("ddpx._native")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    sources = sorted(Path(__file__).with_name("csrc").glob("*.[ch]"))
    built_from = getattr(library, "ddpx_source", int)() & 0xFFFFFFFF
    if sources and built_from != zlib.crc32(b"".join(map(Path.read_bytes, sources))):
        warnings.warn(f"{spec.origin} was built from another {sources[0].parent}: install ddpx again", stacklevel=2)
        return None
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = load()
