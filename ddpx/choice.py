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

# Gloo on the loopback device, where processors are the network: `python -m ddpx bench` with 2, 3 and 4 ranks on two
# cores, six algorithms from 1 KiB to 64 MiB together, off by a third (root mean square). Only alpha / beta and
# gamma > beta / 2 matter to the choice. Alpha is set so that with four ranks ring is taken at 4 MiB (gloo's time over
# ring's 1.0, over tree's 0.87), and with it at 1.4 MB with three (1.1 at 4 MiB), at 2.8 MB with two (0.92; tree 1.04).
MESSAGES = Fabric(alpha_s=115e-6, beta_s_per_byte=1 / 3e9, gamma_s_per_byte=1 / 3e9, concurrent=True)
# Algorithms that "auto" chooses from where ranks send messages: those without options. Of equals the first is taken.
CHOICES = {
    "all_reduce": ("ring", "tree", "doubling", "circulant", "halving_doubling", "direct"),
    "reduce_scatter": ("ring", "circulant", "halving_doubling", "direct"),
    "all_gather": ("ring", "circulant", "halving_doubling", "direct"),
    "broadcast": ("tree", "scatter_gather", "direct"),
    "reduce": ("tree", "scatter_gather", "direct"),
    "all_to_all": ("direct", "pairwise", "bruck"),
}

# Sockets of ours, on the loopback device of two cores as on a network of 10 Gbit/s: with two ranks doubling gives way
# to ring at 0.8 MB, with four to circulant at 0.2 MB (measured on loopback: all within the noise from there on).
SOCKETS = Fabric(alpha_s=50e-6, beta_s_per_byte=1 / 1.25e9, gamma_s_per_byte=1 / 8e9)


def fabric_of(group: Group, transport: MappedTransport | Connected | Hosts | None, link: Link | None) -> Fabric | None:
    """What `transport` is as a network, the same on every rank; None for memory that all ranks map. A collective."""
    if link is not None:  # it holds a rank back once a step
        return Fabric(link.alpha_s, link.beta_s_per_byte, concurrent=True)
    if isinstance(transport, MappedTransport | None):
        return None
    between = transport.between if isinstance(transport, Hosts) else transport
    if isinstance(between, Sockets):
        return SOCKETS
    if between.device.type != "cpu" or len(set(group.gather("hosts", host_id()))) > 1:
        return replace(SOCKETS, alpha_s=MESSAGES.alpha_s)  # each rank has a wire of its own
    return replace(MESSAGES, ranks_per_core=ranks_per_core(group))


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
