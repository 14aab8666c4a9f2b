"""Collectives as calls on a group: which algorithm, over which transport, on which stream.

A `Communicator` owns one transport and one communication stream. Plans are compiled once and run many times; all ranks
compile and run the same ones in the same order. Two ways lead in: plans on buffers that live in the transport's memory,
as the reducer's buckets do, and the six collectives of torch.distributed on tensors that live anywhere. Use one
communicator for one of them: they number their steps differently.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ddpx import collectives
from ddpx.algorithms import ALGORITHMS, build
from ddpx.choice import algorithm_for, fabric_of
from ddpx.collectives import Call, Calls, Exchange, Op, Work, group_of, root_of
from ddpx.errors import Error
from ddpx.execute import Plan, compile_plan
from ddpx.group import Group, announcing
from ddpx.schedule import Schedule
from ddpx.stream import Pending, open_stream
from ddpx.transport import Link, MappedTransport
from ddpx.transport.connected import Connected
from ddpx.transport.hosts import Hosts
from ddpx.transport.process_group import ProcessGroup
from ddpx.transport.shared_memory import SharedMemory, host_id
from ddpx.transport.sockets import Sockets, open_messages

TRANSPORTS = ("auto", "shared_memory", "sockets", "process_group", "hierarchical")
NAMES = {
    SharedMemory: "shared_memory",
    Sockets: "sockets",
    ProcessGroup: "process_group",
    Hosts: "hierarchical",
}
CANCEL_S = 1.0


class NothingToDo:
    """The plan of a group of one, and of a bucket that a communication hook reduces."""

    peer_wait_s = 0.0
    last_peer = 0

    def run(self) -> None:
        pass


class Communicator:
    """The six collectives on one group. Constructing it is a collective; use it from one thread.

        communicator = ddpx.Communicator(mesh["dp"])
        work = communicator.all_reduce(tensor, op="avg", async_op=True)
        ...
        work.wait()

    `group`: a ProcessGroup, a dimension of a DeviceMesh, or None for the world. `algorithm` (of all-reduce) and
    `transport` are names or "auto"; `link` emulates a slow network on top; `timeout_s` is the deadline of every wait,
    by default the process group's. With `check`, or DDPX_CHECK=1 in the environment, ranks agree on each call before it
    starts, which costs milliseconds; without it, on each new one, and shared memory compares the others as it goes.

    Methods are named and behave like torch.distributed's; `op` is a ReduceOp or sum, avg, max, min, product. Each
    takes an `algorithm` of its own collective. All ranks of the group make the same calls in the same order, or get
    Mismatch with everybody's calls. Raises ValueError for an unknown name, Error on every rank when the transport
    asked for does not join them.
    """

    def __init__(
        self,
        group: Group | dist.ProcessGroup | dist.DeviceMesh | None = None,
        device: torch.device | str = "cpu",
        algorithm: str = "auto",
        transport: str = "auto",
        link: Link | None = None,
        *,
        timeout_s: float | None = None,
        check: bool = False,
    ) -> None:
        known = ALGORITHMS["all_reduce"]
        if algorithm != "auto" and algorithm not in known:
            raise ValueError(f"unknown algorithm {algorithm!r}; known: auto, {', '.join(known)}")
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}; known: {', '.join(TRANSPORTS)}")
        self.group = group if isinstance(group, Group) else Group(group_of(group), timeout_s)
        self.device = torch.device(device)
        self.algorithm = algorithm
        self.link = link
        with announcing(self.group, "Communicator"):
            self.stream = open_stream(self.device)
            self.transport = None if self.group.world_size == 1 else _open_transport(self.group, self.device, transport)
            self._fabric = fabric_of(self.group, self.transport, link)
        self._calls = Calls(self, check or os.environ.get("DDPX_CHECK", "0") != "0")
        self._arenas: dict[int, torch.Tensor] = {}  # where user's tensors may be reduced in place, by number
        self._arenas_made = 0
        self._epoch = 0

    @property
    def transport_name(self) -> str:
        return "none" if self.transport is None else NAMES[type(self.transport)]

    @property
    def bytes_received(self) -> int:
        """Bytes that came from peers since construction, as the transports counted them: received, or read in place."""
        transport = self.transport
        if isinstance(transport, Hosts):
            return transport.local.bytes_read + transport.between.bytes_received
        if isinstance(transport, Connected):
            return transport.bytes_received
        return 0 if transport is None else transport.bytes_read

    # ---- The six collectives -----------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", async_op: bool = False, *, algorithm: str | None = None
    ) -> Work | None:
        """`tensor` becomes the sum (or other `op`) over ranks: the same bits on all of them."""
        return self._run(collectives.all_reduce(self.group, tensor, op), async_op, algorithm)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: Op = "sum",
        async_op: bool = False,
        *,
        group_dst: int | None = None,
        algorithm: str | None = None,
    ) -> Work | None:
        """`tensor` becomes the sum over ranks at `dst`, a global rank; the others keep theirs."""
        root = root_of(self.group, "dst", dst, group_dst)
        return self._run(collectives.reduce(self.group, tensor, root, op), async_op, algorithm)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        async_op: bool = False,
        *,
        group_src: int | None = None,
        algorithm: str | None = None,
    ) -> Work | None:
        """`tensor` becomes what it is at `src`, a global rank, bit for bit. Any type."""
        root = root_of(self.group, "src", src, group_src)
        return self._run(collectives.broadcast(self.group, tensor, root), async_op, algorithm)

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """`output_tensor`, n times as large, becomes all ranks' `input_tensor` in rank order."""
        call = collectives.all_gather_into_tensor(self.group, output_tensor, input_tensor)
        return self._run(call, async_op, algorithm)

    def all_gather(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """`tensor_list[r]` becomes rank r's `tensor`. Sizes may differ by rank; every rank knows them all."""
        return self._run(collectives.all_gather(self.group, tensor_list, tensor), async_op, algorithm)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Op = "sum",
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """`output` becomes this rank's n-th part of the sum of all `input`s, which are n times as large."""
        return self._run(collectives.reduce_scatter_tensor(self.group, output, input, op), async_op, algorithm)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Op = "sum",
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """`output` becomes the sum of all ranks' `input_list[rank]`. Sizes in the list may differ."""
        return self._run(collectives.reduce_scatter(self.group, output, input_list, op), async_op, algorithm)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Cut `input` along its first dimension, one piece for each rank; `output` becomes the pieces for this one.

        All pieces alike, or of the sizes given: then ranks tell each other their sizes first, so that a difference is
        an error on all of them. The staged buffer holds the pieces of all ranks together.
        """
        exchange = collectives.all_to_all_single(self.group, output, input, output_split_sizes, input_split_sizes)
        return self._exchange(exchange, async_op, algorithm)

    def all_to_all(
        self,
        output_tensor_list: Sequence[torch.Tensor],
        input_tensor_list: Sequence[torch.Tensor],
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """`output_tensor_list[r]` becomes rank r's `input_tensor_list[rank]`. Sizes may differ, as above."""
        exchange = collectives.all_to_all(self.group, output_tensor_list, input_tensor_list)
        return self._exchange(exchange, async_op, algorithm)

    def _exchange(self, exchange: Exchange, async_op: bool, algorithm: str | None) -> Work | None:
        notes = None
        if not exchange.even:
            n = self.group.world_size
            notes = torch.empty(n, 2, n, dtype=torch.int64, device=self.device)
            self._run(collectives.exchange_sizes(self.group, exchange, notes), False, None)
        return self._run(collectives.exchange_pieces(self.group, exchange, notes), async_op, algorithm)

    def _run(self, call: Call, async_op: bool, algorithm: str | None) -> Work | None:
        if algorithm is not None:
            known = ALGORITHMS[call.collective]
            if algorithm not in known:
                raise ValueError(f"unknown algorithm {algorithm!r} for {call.collective}; known: {', '.join(known)}")
            call = replace(call, algorithm=algorithm, text=f"{call.text} by {algorithm}")
        return self._calls.run(self._in_place(call), async_op)

    def _in_place(self, call: Call) -> Call:
        """The call, to run where its tensor lies if that is memory which peers read: nothing is staged then."""
        if not self._arenas or call.collective not in ("all_reduce", "broadcast"):
            return call  # a reduce would change what the other ranks are to keep
        ((_, _, tensor),) = call.loads or call.stores
        for number, arena in self._arenas.items():
            begin = tensor.data_ptr() - arena.data_ptr()
            if begin >= 0 and begin + tensor.nbytes <= arena.nbytes and tensor.is_contiguous():
                text = f"{call.text} in arena {number} at byte {begin}"
                return replace(call, in_place=tensor.view(-1), text=text)
        return call

    # ---- Plans -------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, (numel,), zeroed, that plans can run on. A collective.

        In shared memory, all_reduce and broadcast of it (or of a contiguous part) run in place, without staging.
        """
        if self.transport is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        flat = self.transport.empty(numel, dtype, self.device)
        if isinstance(self.transport, MappedTransport):
            self._arenas_made += 1
            self._arenas[self._arenas_made] = flat
        return flat

    def release(self, flat: torch.Tensor) -> None:
        """Let memory from `empty` go, with the last tensor on it. All ranks release alike."""
        if self.transport is not None:
            self._calls.forget(flat)
            self._arenas = {n: arena for n, arena in self._arenas.items() if arena.data_ptr() != flat.data_ptr()}
            self.transport.release(flat)

    def choose(self, nbytes: int, collective: str = "all_reduce") -> str:
        """The algorithm for a buffer of `nbytes`; the same on every rank."""
        if collective == "all_reduce":
            if isinstance(self.transport, Hosts):
                return "hierarchical"
            if self.algorithm != "auto":
                return self.algorithm
        return algorithm_for(collective, self.group.world_size, nbytes, self._fabric)

    def schedule(self, collective: str, nbytes: int, algorithm: str | None = None, root: int = 0) -> Schedule:
        """The schedule of a collective over this group, by name or by size."""
        algorithm = algorithm or self.choose(nbytes, collective)
        nodes = None
        if algorithm == "hierarchical" and isinstance(self.transport, Hosts):
            nodes = tuple(map(tuple, self.transport.nodes))
        return _schedule(collective, algorithm, self.group.world_size, root, nodes)

    def compile(
        self,
        schedule: Schedule,
        flat: torch.Tensor,  # (numel,), in memory from `empty`
        operation: str = "sum",
        places: Sequence[tuple[int, int]] | None = None,
    ) -> Plan:
        """The plan of a schedule on `flat`; see `execute.compile_plan`."""
        transport = self.transport
        assert transport is not None
        if isinstance(transport, Hosts) and schedule.algorithm != "hierarchical":
            transport = transport.between
        return compile_plan(schedule, transport, flat, operation, self.link, places)

    def plan_all_reduce(self, flat: torch.Tensor, operation: str = "sum", algorithm: str | None = None) -> Plan:
        """A plan that makes `flat`, in memory from `empty`, the sum over ranks; the same bits on all of them."""
        if self.transport is None:
            return NothingToDo()
        return self.compile(self.schedule("all_reduce", flat.nbytes, algorithm), flat, operation)

    def plan_broadcast(self, flat: torch.Tensor, root: int = 0) -> Plan:
        """A plan that makes `flat`, in memory from `empty`, bitwise the root's."""
        if self.transport is None:
            return NothingToDo()
        return self.compile(self.schedule("broadcast", flat.nbytes, root=root), flat)

    # ---- The stream, and failures ------------------------------------------------------------------------------------

    def start(self, run: Callable[[], None]) -> Pending:
        """Run a plan on the communication stream, after what the caller has computed so far."""
        return self.stream.submit(run)

    def run(self, run: Callable[[], None]) -> Pending:
        """Run a plan that the caller will wait for at once: in its own thread where waits there look at the peers."""
        return self.stream.run(run) if isinstance(self.transport, SharedMemory) else self.stream.submit(run)

    def settle(self) -> None:
        """Make the waits that plans run `without_end_waits` in this epoch have put off."""
        if isinstance(self.transport, SharedMemory):
            self.transport.settle()

    def wait(self, pending: Pending) -> None:
        """Order the caller after `pending`; raise what went wrong there, or what a peer announced meanwhile."""
        pending.wait(self.poll, self.group.timeout_s + 5)

    def poll(self) -> None:
        if self.transport is not None:
            self.transport.poll()

    def begin(self, epoch: int, header: int | None) -> None:
        """Enter an epoch, in which all ranks must have `header` in common; None where this one enters only to fail."""
        if self.transport is not None:
            self._epoch = epoch
            self.group.enter(f"epoch {epoch}", self.transport.poll)
            self.transport.begin(epoch, header)

    def fail(self, message: str) -> None:
        """Tell the group that this rank failed in the present epoch, and drop what is under way."""
        if self.transport is None:
            return
        self.transport.fail(message)
        self.transport.disconnect()
        self.group.enter(f"after epoch {self._epoch}", None)
        # The thread is at work, which ends, or in a wait, which has been ended. It has to be out of there before the
        # next epoch: what it does then, on buffers and clock, would be taken for that epoch's.
        while not self.stream.cancel(CANCEL_S):
            if self.transport.is_stranded():
                self.stream.abandon()
                break
        self._shut()

    def enter(self, number: int, header: int) -> None:
        """Begin a numbered call: ranks that share memory compare its header as they go, messages carry it as a tag."""
        transport = self.transport.between if isinstance(self.transport, Hosts) else self.transport
        if isinstance(transport, SharedMemory):
            transport.begin(number, header)
        elif transport is not None:
            transport.mark(number, header)

    def announce(self, message: str) -> None:
        """Tell the group, for good, that this rank failed in a call. From the thread that ran it."""
        if self.transport is not None:
            self.transport.fail(message)
            self.group.announce(message)
            self.transport.disconnect()
            self._shut()

    def _shut(self) -> None:
        """Keep sums that a late peer delivers out of the memory that this rank goes on with."""
        transport = self.transport.local if isinstance(self.transport, Hosts) else self.transport
        if isinstance(transport, SharedMemory):
            transport.shut()

    def absent(self) -> list[int]:
        """The ranks that are known not to have come to the present call."""
        return self.transport.absent() if isinstance(self.transport, SharedMemory) else []

    def close(self) -> None:
        if not self.stream.close() and self.transport is not None:
            # A thread that waits in gloo when the interpreter goes would take the process down with it.
            self.transport.disconnect()
            self.stream.close()
        self._calls.close()
        self._arenas = {}
        if self.transport is not None:
            self.transport.close()


def _open_transport(group: Group, device: torch.device, name: str) -> SharedMemory | Connected | Hosts:
    """By name; auto is shared memory where it joins all ranks, with messages between hosts where there are several.

    Same host is proved by mapping, not by LOCAL_WORLD_SIZE.
    """
    if name in ("shared_memory", "sockets", "hierarchical") and device.type != "cpu":
        raise ValueError(f"{name} joins CPU ranks; use transport='process_group' on CUDA")
    if name == "sockets":
        return Sockets(group)
    if name == "process_group" or device.type != "cpu":
        return ProcessGroup(group, device)
    hosts = group.gather("hosts", host_id())
    nodes = [[rank for rank, host in enumerate(hosts) if host == name_of] for name_of in dict.fromkeys(hosts)]
    if name == "hierarchical" or (name == "auto" and 1 < len(nodes) < group.world_size):
        return Hosts(group, nodes)
    if name == "auto" and len(nodes) > 1:
        return open_messages(group)
    try:
        return SharedMemory(group)
    except Error:
        if name == "shared_memory":
            raise
        return open_messages(group)


@lru_cache(maxsize=64)
def _schedule(
    collective: str, algorithm: str, world_size: int, root: int, nodes: tuple[tuple[int, ...], ...] | None
) -> Schedule:
    options: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
    return build(collective, algorithm, world_size, root, **options)
