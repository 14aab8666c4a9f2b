"""Quantities as people write them: 25MiB, 10us, 50GB/s. Pure.

Prefixes k, M and G are powers of 1000; Ki, Mi and Gi of 1024.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_bytes(text: str) -> int:
    """25MiB, 4KB, 1.5GB or a plain number of bytes. ValueError says what is wrong."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:(|[kKMG]i?)B)?\s*", text)
    if not found:
        raise ValueError(f"a size is a number of bytes such as 25MiB, 4KB or 1000, not '{text}'")
    return int(float(found[1]) * _PREFIXES[found[2] or ""])


def parse_seconds(text: str) -> float:
    """10us, 1.5ms, 0s. ValueError says what is wrong."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)\s*", text)
    if not found:
        raise ValueError(f"a time is such as 10us, 1.5ms or 2s, not '{text}'")
    return float(found[1]) * _SECONDS[found[2]]


def parse_bandwidth(text: str) -> float:
    """50GB/s or 10Gbit/s, as bytes per second. ValueError says what is wrong."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|[kKMG]i?)(B|bit)/s\s*", text)
    if not found or float(found[1]) == 0:
        raise ValueError(f"a bandwidth is such as 50GB/s or 10Gbit/s, and not zero: not '{text}'")
    return float(found[1]) * _PREFIXES[found[2]] / (8 if found[3] == "bit" else 1)


def bytes_text(nbytes: float) -> str:
    """25 MiB, 4 KB, 1.2 GB: in binary units what is a multiple of 1024 and not of 1000, in decimal ones all else."""
    binary = nbytes % 1024 == 0 and nbytes % 1000 != 0
    step, suffix = (1024, "iB") if binary else (1000, "B")
    prefixes = ("", "K", "M", "G", "T", "P")
    power = 0
    while nbytes >= step and power < len(prefixes) - 1:
        nbytes /= step
        power += 1
    return f"{nbytes:.4g} {prefixes[power]}{suffix if power else 'B'}"


def seconds_text(seconds: float) -> str:
    """Four digits in a unit that fits: 12.34 us, 1.260 ms, 2.521 s."""
    for unit, factor in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.95 * factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds)} s"


def bandwidth_text(bytes_per_s: float) -> str:
    """12.3 GB/s, 4.56 MB/s."""
    unit, factor = ("GB/s", 1e9) if bytes_per_s >= 1e8 else ("MB/s", 1e6)
    return f"{bytes_per_s / factor:.3g} {unit}"


def _digits(value: float) -> str:
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they have to be, the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )
