"""What a plan on a mapped transport is made of: waits, sums, copies and publications, bound to memory.

Two interpreters run them: Python, call by call (`ddpx.execute`), and one compiled call (`ddpx.native`). Both add in the
order listed; bf16 and fp16 add in fp32 and round once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

BLOCK_BYTES = 256 << 10
HALVES = (torch.bfloat16, torch.float16)
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Until the peer's clock has advanced by `tick` since the plan began."""

    peer: int
    tick: int


@dataclass(frozen=True, slots=True, eq=False)
class Publish:
    """Advance my clock to `tick`."""

    tick: int


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """What an emulated link takes."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Say that I write into my peers' memory from here on, unless one of them has shut it."""


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """Say that I have written there."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    out: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Combine:
    """out = sources[0] op sources[1] op ..., in that order; `out` may be one of the sources.

    `peers` get the same, in their own memory: between Claim and Release, and in the compiled interpreter alone.
    """

    out: torch.Tensor
    sources: tuple[torch.Tensor, ...]
    operation: str
    peers: tuple[torch.Tensor, ...] = ()
    past_caches: bool = False  # write to memory directly: nothing so large stays in a cache until it is read


Operation = Wait | Publish | Hold | Claim | Release | Copy | Combine


def end_waits(operations: Sequence[Operation]) -> list[Wait]:
    """The waits that a plan ends with: nothing in it comes after them."""
    ends: list[Wait] = []
    for operation in reversed(operations):
        if not isinstance(operation, Wait):
            break
        ends.append(operation)
    return ends[::-1]


def compute(out: torch.Tensor, sources: Sequence[torch.Tensor], operation: str) -> Copy | Combine:
    return Copy(out, sources[0]) if len(sources) == 1 else Combine(out, tuple(sources), operation)


def action(operation: Copy | Combine) -> Callable[[], object]:
    """The operation as a call of torch: in blocks that stay in the second-level cache, with views cut beforehand."""
    if isinstance(operation, Copy):
        return partial(operation.out.copy_, operation.source)
    out, sources = operation.out, operation.sources
    combine = OPERATIONS[operation.operation]
    wide = out.dtype in HALVES
    block = max(1, BLOCK_BYTES // (4 if wide else out.element_size()))
    if out.device.type != "cpu":
        block = max(1, out.numel())  # there each block would be kernels of its own
    length = min(block, out.numel())
    accumulator = torch.empty(length, dtype=torch.float32 if wide else out.dtype, device=out.device)
    operand = torch.empty(length if wide else 0, dtype=torch.float32, device=out.device)
    blocks = []
    for begin in range(0, out.numel(), block):
        end = min(begin + block, out.numel())
        views = [source[begin:end] for source in sources]
        blocks.append((out[begin:end], views, accumulator[: end - begin], operand[: end - begin]))

    def narrow_blocks() -> None:
        for out, views, accumulator, _ in blocks:
            if len(views) == 2:
                combine(views[0], views[1], out=out)
                continue
            combine(views[0], views[1], out=accumulator)
            for view in views[2:-1]:
                combine(accumulator, view, out=accumulator)
            combine(accumulator, views[-1], out=out)

    def wide_blocks() -> None:
        for out, views, accumulator, operand in blocks:
            accumulator.copy_(views[0])
            for view in views[1:]:
                operand.copy_(view)  # a mixed-dtype add is 20 times slower than converting first
                combine(accumulator, operand, out=accumulator)
            out.copy_(accumulator)

    return wide_blocks if wide else narrow_blocks
