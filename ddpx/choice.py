"""Which algorithm "auto" takes: the cheapest by formula on what the ranks are joined by."""

import os
from dataclasses import replace

from ddpx.cost import Fabric, choose
from ddpx.group import Group
from ddpx.processes import this_host
from ddpx.transport import Link, MappedTransport
from ddpx.transport.connected import Connected
from ddpx.transport.hosts import Hosts
from ddpx.transport.shared_memory import host_id
from ddpx.transport.sockets import Sockets

# Gloo on the loopback device, fitted to `python -m ddpx bench` with 2, 3 and
# 4 ranks on two cores, six algorithms from 1 KiB to 64 MiB together, off by 29 % (root mean square). Of the three only
# alpha / beta and gamma > beta / 2 matter to the choice. With two ranks tree gives way to ring at 4.8 MB (measured: 4
# to 8 MiB), with three at 2.4 MB (2 to 4 MiB), with four at 6.6 MB (2 to 16 MiB, all within a tenth of each other).
MESSAGES = Fabric(alpha_s=200e-6, beta_s_per_byte=1 / 3e9, gamma_s_per_byte=1 / 3e9, concurrent=True)
# Algorithms that "auto" chooses from where ranks send messages: those without options. Of equals the first is taken.
CHOICES = {
    "all_reduce": ("ring", "tree", "doubling", "circulant", "halving_doubling", "direct"),
    "reduce_scatter": ("ring", "circulant", "halving_doubling", "direct"),
    "all_gather": ("ring", "circulant", "halving_doubling", "direct"),
    "broadcast": ("tree", "scatter_gather", "direct"),
    "reduce": ("tree", "scatter_gather", "direct"),
    "all_to_all": ("direct", "pairwise", "bruck"),
}

# Sockets on the loopback device.
SOCKETS = Fabric(alpha_s=25e-6, beta_s_per_byte=1 / 3e9, gamma_s_per_byte=1 / 4e9, concurrent=True)
# Hosts on an ordinary network: every rank has its own wire, which carries both ways at once, and adds itself. With two
# ranks doubling gives way to ring at 0.6 MB.
WIRE = Fabric(alpha_s=60e-6, beta_s_per_byte=1 / 1.25e9, gamma_s_per_byte=1 / 5e9, concurrent=True)


def fabric_of(group: Group, transport: MappedTransport | Connected | Hosts | None, link: Link | None) -> Fabric | None:
    """What `transport` is as a network, the same on every rank; None for memory that all ranks map. A collective."""
    if link is not None:  # it holds a rank back once a step
        return Fabric(link.alpha_s, link.beta_s_per_byte, concurrent=True)
    if isinstance(transport, Hosts):
        return WIRE
    if not isinstance(transport, Connected):
        return None
    if transport.device.type != "cpu" or len(set(group.gather("hosts", host_id()))) > 1:
        return WIRE
    of_all = SOCKETS if isinstance(transport, Sockets) else MESSAGES
    return replace(of_all, ranks_per_core=ranks_per_core(group))


def algorithm_for(collective: str, world_size: int, nbytes: int, fabric: Fabric | None) -> str:
    """For a buffer of `nbytes`; the same on every rank."""
    if fabric is None or world_size == 1:
        return "direct"
    of_rank = nbytes / world_size if collective == "all_to_all" else nbytes
    return choose(world_size, of_rank, fabric, collective, CHOICES[collective]).algorithm


def ranks_per_core(group: Group) -> float:
    """On the most crowded host; the same on every rank. A collective."""
    told = group.gather("processors", (this_host(), len(os.sched_getaffinity(0))))
    return max(sum(there == host for there, _ in told) / cores for host, cores in told)
