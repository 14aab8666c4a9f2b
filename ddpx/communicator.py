"""Collectives as calls on a group: which algorithm, over which transport, on which stream.

A `Communicator` owns one transport and one communication stream. Plans are compiled once and run many times; all ranks
compile and run the same ones in the same order.
"""

from collections.abc import Callable

import torch

from ddpx.algorithms import ALGORITHMS, build
from ddpx.errors import Error
from ddpx.execute import Plan, compile_plan
from ddpx.group import Group
from ddpx.stream import Pending, ThreadStream, open_stream
from ddpx.transport import Link, MappedTransport
from ddpx.transport.hosts import Hosts
from ddpx.transport.process_group import ProcessGroup
from ddpx.transport.shared_memory import SharedMemory, host_id

TRANSPORTS = ("auto", "shared_memory", "process_group", "hierarchical")
SMALL_BYTES = 64 << 10  # below it, messages cost more than bytes
CANCEL_S = 1.0


class _NothingToDo:
    """The plan of a group of one."""

    peer_wait_s = 0.0
    last_peer = 0

    def run(self) -> None:
        pass


class Communicator:
    """All-reduces on one group. Constructing it is a collective.

    `algorithm` and `transport` are names or "auto"; `link` emulates a slow network on top. Raises ValueError for an
    unknown name, Error on every rank when the transport asked for does not join them.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        algorithm: str = "auto",
        transport: str = "auto",
        link: Link | None = None,
    ) -> None:
        known = ALGORITHMS["all_reduce"]
        if algorithm != "auto" and algorithm not in known:
            raise ValueError(f"unknown algorithm {algorithm!r}; known: auto, {', '.join(known)}")
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}; known: {', '.join(TRANSPORTS)}")
        self.group = group
        self.device = device
        self.algorithm = algorithm
        self.link = link
        self.stream = open_stream(device)
        self.transport = None if group.world_size == 1 else _open_transport(group, device, transport)

    @property
    def transport_name(self) -> str:
        names = {SharedMemory: "shared_memory", ProcessGroup: "process_group", Hosts: "hierarchical"}
        return "none" if self.transport is None else names[type(self.transport)]

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, (numel,), zeroed, that plans can run on. A collective."""
        if self.transport is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return self.transport.empty(numel, dtype, self.device)

    def release(self, flat: torch.Tensor) -> None:
        if self.transport is not None:
            self.transport.release(flat)

    def choose(self, nbytes: int) -> str:
        """The all-reduce algorithm for a buffer of `nbytes`; the same on every rank."""
        if isinstance(self.transport, Hosts):
            return "hierarchical"
        if self.algorithm != "auto":
            return self.algorithm
        if isinstance(self.transport, MappedTransport) or self.group.world_size <= 2:
            return "direct"
        return "ring" if nbytes >= SMALL_BYTES else "tree"

    def plan_all_reduce(self, flat: torch.Tensor, operation: str = "sum") -> Plan:
        """A plan that makes `flat`, in memory from `empty`, the sum over ranks; the same bits on all of them."""
        if self.transport is None:
            return _NothingToDo()
        options = {"nodes": self.transport.nodes} if isinstance(self.transport, Hosts) else {}
        schedule = build("all_reduce", self.choose(flat.nbytes), self.group.world_size, **options)
        return compile_plan(schedule, self.transport, flat, operation, self.link)

    def plan_broadcast(self, flat: torch.Tensor, root: int = 0) -> Plan:
        """A plan that makes `flat`, in memory from `empty`, bitwise the root's."""
        if self.transport is None:
            return _NothingToDo()
        transport = self.transport.between if isinstance(self.transport, Hosts) else self.transport
        return compile_plan(build("broadcast", "tree", self.group.world_size, root=root), transport, flat)

    def start(self, run: Callable[[], None]) -> Pending:
        """Run a plan on the communication stream, after what the caller has computed so far."""
        return self.stream.submit(run)

    def wait(self, pending: Pending) -> None:
        """Order the caller after `pending`; raise what went wrong there, or what a peer announced meanwhile."""
        pending.wait(self.poll, self.group.timeout_s + 5)

    def poll(self) -> None:
        if self.transport is not None:
            self.transport.poll()

    def begin(self, epoch: int, header: int) -> None:
        """Enter an epoch, in which all ranks must have `header` in common."""
        if self.transport is not None:
            self.transport.begin(epoch, header)

    def fail(self, message: str) -> None:
        """Tell the group that this rank failed in the present epoch, and drop what is under way."""
        if self.transport is None:
            return
        self.transport.fail(message)
        if not self.stream.cancel(CANCEL_S):
            # The thread sits in a wait that can't be interrupted; it ends by itself when its peers' connections close.
            self.stream.close()
            self.stream = ThreadStream()
        self.transport.disconnect()

    def close(self) -> None:
        self.stream.close()
        if self.transport is not None:
            self.transport.close()


def _open_transport(group: Group, device: torch.device, name: str) -> SharedMemory | ProcessGroup | Hosts:
    """By name; auto is shared memory where it joins all ranks, with messages between hosts where there are several.

    Same host is proved by mapping, not by LOCAL_WORLD_SIZE.
    """
    if name in ("shared_memory", "hierarchical") and device.type != "cpu":
        raise ValueError(f"{name} joins CPU ranks; use transport='process_group' on CUDA")
    if name == "process_group" or device.type != "cpu":
        return ProcessGroup(group, device)
    hosts = group.gather("hosts", host_id())
    nodes = [[rank for rank, host in enumerate(hosts) if host == name_of] for name_of in dict.fromkeys(hosts)]
    if name == "hierarchical" or (name == "auto" and 1 < len(nodes) < group.world_size):
        return Hosts(group, nodes)
    if name == "auto" and len(nodes) > 1:
        return ProcessGroup(group, device)
    try:
        return SharedMemory(group)
    except Error:
        if name == "shared_memory":
            raise
        return ProcessGroup(group, device)
