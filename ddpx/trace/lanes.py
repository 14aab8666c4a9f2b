"""Compact stores of what ran when: a CPU thread's operators, a GPU stream's events, an operator's samples."""

from __future__ import annotations

import heapq
import tempfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import BinaryIO

from ddpx.trace.intervals import Interval

ROWS_IN_MEMORY = 200_000  # of one thread
ROW_BYTES = 24
SAMPLES = 512  # kept per operator and shape


class Lane:
    """Busy time of one thread: outermost intervals with the names at their ends.

    A thread's events come nearly sorted by start, so most are absorbed by the last row at once. Those that come late
    wait in a list and are merged in bulk. Rows are compact (24 bytes) and go to an unnamed temporary file beyond
    ROWS_IN_MEMORY, so that memory doesn't grow with the trace.
    """

    __slots__ = ("start", "end", "first", "last", "late", "sample_end", "spilled", "file")

    def __init__(self) -> None:
        self._open()
        self.late: list[tuple[int, int, int, int]] = []
        self.sample_end = -(1 << 62)
        self.spilled: list[tuple[int, int]] = []  # (rows, end of the last one) of each block in the file
        self.file: BinaryIO | None = None

    def _open(self) -> None:
        self.start, self.end, self.first, self.last = array("q"), array("q"), array("i"), array("i")

    def add(self, start: int, end: int, first: int, last: int) -> None:
        if end <= start:
            return
        ends = self.end
        if not ends or start > ends[-1]:
            if len(ends) > ROWS_IN_MEMORY:
                self._spill()
            self.start.append(start)
            self.end.append(end)
            self.first.append(first)
            self.last.append(last)
        elif start < self.start[-1]:
            self.late.append((start, end, first, last))
            if len(self.late) > 4096 + len(ends) // 4:
                self.settle()
        elif end > ends[-1]:
            ends[-1] = end
            self.last[-1] = last

    def _spill(self) -> None:
        """Write the rows to the file; the last stays, since the next event may extend it."""
        if self.file is None:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        for column in (self.start, self.end, self.first, self.last):
            column[:-1].tofile(self.file)
        self.spilled.append((len(self.end) - 1, self.end[-2]))
        for column in (self.start, self.end, self.first, self.last):
            del column[:-1]

    def _blocks(self, since: int = 0) -> Iterator[tuple[array[int], array[int], array[int], array[int]]]:
        """Columns of each block in order of time, from the block `since`."""
        for i in range(since, len(self.spilled)):
            assert self.file is not None
            rows = self.spilled[i][0]
            self.file.seek(ROW_BYTES * sum(block[0] for block in self.spilled[:i]))
            columns = array("q"), array("q"), array("i"), array("i")
            for column in columns:
                column.fromfile(self.file, rows)
            yield columns
        yield self.start, self.end, self.first, self.last

    def settle(self) -> None:
        """Merge the late rows in."""
        if not self.late:
            return
        late, self.late = sorted(self.late), []
        rows = (row for block in self._blocks() for row in zip(*block, strict=True))
        merged = Lane()
        for row in heapq.merge(rows, late):
            merged.add(*row)
        self.close()
        self.start, self.end, self.first, self.last = merged.start, merged.end, merged.first, merged.last
        self.spilled, self.file, merged.file = merged.spilled, merged.file, None

    def close(self) -> None:
        """Give the temporary file back; the lane is of no use after that."""
        if self.file is not None:
            self.file.close()

    __del__ = close

    def intervals(self) -> Iterator[Interval]:
        for start, end, _, _ in self._blocks():
            yield from zip(start, end, strict=True)

    def before(self, t: int) -> tuple[int, int] | None:
        """(end, name) of the last interval that ends by t."""
        found = None
        for _, end, _, last in self._blocks(max(0, self._block_of(t) - 1)):
            i = bisect_right(end, t) - 1
            if i < 0:
                break
            found = end[i], last[i]
        return found

    def after(self, t: int) -> tuple[int, int] | None:
        """(start, name) of the first interval that starts at t or later."""
        for start, _, first, _ in self._blocks(self._block_of(t)):
            i = bisect_left(start, t)
            if i < len(start):
                return start[i], first[i]
        return None

    def _block_of(self, t: int) -> int:
        """The first block that ends after t."""
        return bisect_right([end for _, end in self.spilled], t)


class Stream:
    """Device events of one stream in order of start."""

    __slots__ = ("start", "end", "name", "correlation", "is_sorted")

    def __init__(self) -> None:
        self.start = array("q")
        self.end = array("q")
        self.name = array("i")
        self.correlation = array("q")
        self.is_sorted = True

    def add(self, start: int, end: int, name: int, correlation: int) -> None:
        if self.start and start < self.start[-1]:
            self.is_sorted = False
        self.start.append(start)
        self.end.append(end)
        self.name.append(name)
        self.correlation.append(correlation)

    def settle(self) -> None:
        if self.is_sorted:
            return
        order = sorted(range(len(self.start)), key=self.start.__getitem__)
        for field_ in ("start", "end", "name", "correlation"):
            old = getattr(self, field_)
            setattr(self, field_, array(old.typecode, (old[i] for i in order)))
        self.is_sorted = True

    def __len__(self) -> int:
        return len(self.start)


class Samples:
    """At most SAMPLES (start, end) of one operator and shape, thinned evenly as more come."""

    __slots__ = ("rows", "stride", "seen")

    def __init__(self) -> None:
        self.rows: list[Interval] = []
        self.stride = 1
        self.seen = 0

    def add(self, start: int, end: int) -> None:
        if self.seen % self.stride == 0:
            self.rows.append((start, end))
            if len(self.rows) > SAMPLES:
                del self.rows[1::2]
                self.stride *= 2
        self.seen += 1
