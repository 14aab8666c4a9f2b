"""Run a command as on several hosts joined by a slow network, on one Linux machine. Needs root, ip and tc (iproute2).

    python profiles/hosts.py --rate 1gbit -- train.py --modes naive,bucketed,overlapped --link none
    python profiles/hosts.py --rate 4gbit --hosts 2 --ranks-per-host 2 -- train.py --link none

Each host is a network namespace with one end of a veth pair on a common bridge; `tc tbf` limits what each sends. In
every namespace torchrun starts `--ranks-per-host` ranks of the command. DDPX_HOST_ID keeps them from sharing memory
across hosts, which on one machine they could. Namespaces and bridge are taken down at the end, whatever happens.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from types import FrameType

PORT = 29517
PATIENCE_S = 10.0  # for ranks to end when told to


def run(*words: str, check: bool = True) -> None:
    subprocess.run(
        words, check=check, stdout=None if check else subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL
    )


@contextlib.contextmanager
def namespaces(hosts: int, rate: str) -> Iterator[list[str]]:
    """Names of `hosts` network namespaces; host i has the address 10.77.0.(i + 1) and sends at most `rate`."""
    tag = uuid.uuid4().hex[:6]
    hub = f"ddpx{tag}"
    names = [f"{hub}h{host}" for host in range(hosts)]
    try:
        run("ip", "netns", "add", hub)
        run("ip", "netns", "exec", hub, "ip", "link", "add", "bridge", "type", "bridge")
        run("ip", "netns", "exec", hub, "ip", "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            port = f"p{host}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", port, "netns", hub, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "netns", "exec", hub, "ip", "link", "set", port, "master", "bridge", "up")
            run("ip", "netns", "exec", name, "ip", "address", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            run("ip", "netns", "exec", name, "ip", "link", "set", "eth0", "up")
            run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
            # A bucket of 256 KiB lets bursts through; the queue is what a switch port would hold.
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield names
    finally:
        for name in [*names, hub]:
            run("ip", "netns", "delete", name, check=False)


def launch(names: Sequence[str], ranks_per_host: int, command: Sequence[str]) -> int:
    """Run `command`, as torchrun takes it, on all hosts; the first exit code that is not zero. All ends with it."""
    processes = []
    try:
        for host, name in enumerate(names):
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "DDPX_HOST_ID": name}
            words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(names)}", f"--node-rank={host}"]
            words += [f"--nproc-per-node={ranks_per_host}", "--master-addr=10.77.0.1", f"--master-port={PORT}"]
            processes.append(subprocess.Popen(["ip", "netns", "exec", name, *words, *command], env=environment))
        return next((code for code in [process.wait() for process in processes] if code), 0)
    finally:
        for process in processes:
            process.terminate()  # torchrun ends its ranks then
        for process in processes:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def end_as_interrupted(number: int, _: FrameType | None) -> None:
    """For SIGTERM: leave by an exception, so that namespaces are taken down; a second one does not cut that short."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="what each host may send, as tc writes it")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- SCRIPT ARGUMENTS, as torchrun takes them")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("nothing to run: put -- and a script behind the options")
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, end_as_interrupted)
    with namespaces(arguments.hosts, arguments.rate) as names:
        return launch(names, arguments.ranks_per_host, command)


if __name__ == "__main__":
    sys.exit(main())
