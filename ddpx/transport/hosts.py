"""Several ranks on each of several hosts: shared memory inside a host, messages between hosts.

Not a third contract but the two side by side, on the same memory. A schedule that keeps its moves within a host and
between hosts in steps of their own (`algorithms.hierarchical`) falls into phases, each of which one of the two can run.
"""

import torch

from ddpx.group import Group
from ddpx.transport.shared_memory import SharedMemory
from ddpx.transport.sockets import open_messages


class Hosts:
    """`nodes` lists the ranks of each host, as every rank knows them. Constructing it is a collective."""

    def __init__(self, group: Group, nodes: list[list[int]]) -> None:
        self.group = group
        self.nodes = nodes
        self.rank, self.world_size = group.rank, group.world_size
        self.scratch: torch.Tensor | None = None
        mine = next(number for number, node in enumerate(nodes) if group.rank in node)
        self.local = SharedMemory(group.subgroup(nodes[mine], f"host/{mine}"))
        self.between = open_messages(group)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.local.empty(numel, dtype, device)

    def release(self, flat: torch.Tensor) -> None:
        self.local.release(flat)

    def begin(self, epoch: int, header: int | None) -> None:
        self.local.begin(epoch, header)
        self.local.group.enter(f"epoch {epoch}", self.poll)
        self.between.begin(epoch, header)

    def fail(self, message: str) -> None:
        self.local.fail(message)
        self.local.group.enter(f"after epoch {self.between.epoch}", None)
        self.between.fail(message)

    def disconnect(self) -> None:
        self.between.disconnect()

    def is_stranded(self) -> bool:
        return self.between.is_stranded()

    def poll(self) -> None:
        self.local.poll()
        self.between.poll()

    def close(self) -> None:
        self.local.close()
        self.between.close()
