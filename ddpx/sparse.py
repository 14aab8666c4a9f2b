"""Sparse gradients: each rank's rows travel to all, and are added in rank order.

`Embedding(sparse=True)` has gradients of a few rows. They do not go through the arena: ranks tell each other how many
rows they have, gather indices and values, and build the same sum from the same list.
"""

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ddpx.algorithms import build
from ddpx.communicator import Communicator
from ddpx.execute import Plan, compile_plan

ALIGN_BYTES = 16
SMALLEST_BYTES = 4096


def sparse_parameters(module: nn.Module) -> set[Parameter]:
    """Weights of the embeddings that were asked for sparse gradients."""
    return {
        child.weight  # type: ignore[misc]
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }


class SparseMean:
    """Means of sparse gradients over the group. Each call is a collective, in the same order on all ranks."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        world_size = communicator.group.world_size
        self._counts = communicator.empty(world_size, torch.int64)
        self._counts_plan = communicator.plan_all_reduce(self._counts)
        self._gathering: tuple[int, Tensor, Plan] | None = None  # bytes a rank, all ranks' places, plan

    def mean(self, grad: Tensor | None, param: Parameter, divisor: float) -> Tensor | None:
        """The mean of every rank's `grad`, coalesced; a rank without one counts as zero. None if no rank has one."""
        group = self._communicator.group
        if grad is not None and not grad.is_sparse:
            grad = grad.to_sparse(1)
        rows = None if grad is None else grad.coalesce()
        if group.world_size == 1:
            return None if grad is None else grad / divisor
        counts = self._exchange_counts(-1 if rows is None else rows._nnz())
        if max(counts) < 0:
            return None
        sparse_dim = 1 if rows is None else rows.sparse_dim()
        if sparse_dim != 1:
            raise ValueError(f"sparse gradients of one sparse dimension can be reduced, not of {sparse_dim}")
        row_shape = param.shape[1:]
        index_bytes = _aligned(8 * max(counts))
        nbytes = index_bytes + _aligned(max(counts) * row_shape.numel() * param.element_size())
        capacity, places, plan = self._room_for(nbytes)
        if rows is not None and rows._nnz():
            own = places[group.rank * capacity :]
            _bytes_at(own, 0, rows.indices())
            _bytes_at(own, index_bytes, rows.values())
        self._communicator.wait(self._communicator.start(plan.run))
        parts = []
        for rank, count in enumerate(counts):
            if count > 0:
                theirs = places[rank * capacity : (rank + 1) * capacity]
                indices = theirs[: 8 * count].view(torch.int64).view(1, count)
                value_bytes = count * row_shape.numel() * param.element_size()
                values = theirs[index_bytes : index_bytes + value_bytes].view(param.dtype).view(count, *row_shape)
                parts.append((indices, values))
        return _build(param, 1, parts, divisor)

    def _exchange_counts(self, count: int) -> list[int]:
        self._counts.zero_()
        self._counts[self._communicator.group.rank] = count
        self._communicator.wait(self._communicator.start(self._counts_plan.run))
        return self._counts.tolist()

    def _room_for(self, nbytes: int) -> tuple[int, Tensor, Plan]:
        """A place of at least `nbytes` for each rank; grown alike on all ranks, to powers of two."""
        if self._gathering is None or self._gathering[0] < nbytes:
            transport, world_size = self._communicator.transport, self._communicator.group.world_size
            assert transport is not None
            capacity = max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
            if self._gathering is not None:
                self._communicator.release(self._gathering[1])
            places = self._communicator.empty(capacity * world_size, torch.uint8)
            schedule = build("all_gather", "direct", world_size)
            self._gathering = (capacity, places, compile_plan(schedule, transport, places))
        return self._gathering


def _build(param: Parameter, sparse_dim: int, parts: list[tuple[Tensor, Tensor]], divisor: float) -> Tensor:
    if not parts:
        indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=param.device)
        values = torch.empty(0, *param.shape[sparse_dim:], dtype=param.dtype, device=param.device)
    else:
        indices = torch.cat([indices for indices, _ in parts], 1)
        values = torch.cat([values / divisor for _, values in parts])
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()


def _bytes_at(place: Tensor, begin: int, tensor: Tensor) -> None:
    source = tensor.detach().contiguous()
    place[begin : begin + source.nbytes].view(source.dtype).copy_(source.flatten())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
