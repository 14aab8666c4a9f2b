"""When a rank fails, the others are told what, who and where, soon; and where it can go on, the next step is right.

On both transports, since they notice in different ways: shared memory watches processes and a failure word, messages
see connections close and then read the board.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import attempt, run
from torch import Tensor, nn

import ddpx
from ddpx import DDPX

TRANSPORTS = ("shared_memory", "sockets", "process_group")
TINY_MB = 200 / 2**20
FORWARD, AFTER_ALL = -1, -2  # where a model trips, beside layers


class Tripwire(torch.autograd.Function):
    """Passes numbers on, and calls `trip` on the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, trip: Callable[[], None] | None) -> Tensor:
        ctx.trip = trip
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.trip is not None:
            ctx.trip()
        return grad, None


class Model(nn.Module):
    """Eight layers; calls `trip` in the forward (`at` == FORWARD), in the backward of layer `at`, or AFTER_ALL."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(8))

    def forward(self, x: Tensor, trip: Callable[[], None] | None = None, at: int = 4) -> Tensor:
        if trip is not None and at == FORWARD:
            trip()
        if at == AFTER_ALL:
            x = Tripwire.apply(x.requires_grad_(), trip)
        for number, layer in enumerate(self.layers):
            x = Tripwire.apply(layer(x).tanh(), trip if number == at else None)
        return x


def boom() -> None:
    raise KeyError("a key that is not there")


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def wrapped(rank: int, transport: str, **options: Any) -> DDPX:
    """A model in tiny buckets. Ranks 2k and 2k + 1 count as host k where the transport is "hierarchical"."""
    host = {"DDPX_HOST_ID": f"host {rank // 2}"} if transport == "hierarchical" else {}
    with unittest.mock.patch.dict(os.environ, host):
        return DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport, **options)


def assert_right(model: DDPX, world_size: int, step: int) -> None:
    """Gradients are the mean over ranks, to rounding: sums of some 100 numbers below 1 in fp32, 1e-5 at most."""
    reference = Model()
    reference.load_state_dict(model.module.state_dict())
    for rank in range(world_size):
        (reference(batch_of(step, rank)).square().sum() / world_size).backward()
    for mine, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


# ---- A rank is killed ------------------------------------------------------------------------------------------------


def killed_in_backward(
    rank: int, world_size: int, transport: str, algorithm: str, victim: int
) -> tuple[str, str, float]:
    """Rank `victim` dies by SIGKILL in the middle of its third backward; what the others see, and after how long."""
    model = wrapped(rank, transport, algorithm=algorithm)
    for step in range(2):
        model.zero_grad()
        model(batch_of(step, rank)).square().sum().backward()
    began = 0.0
    named = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    assert not named, named  # no file could be left behind

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        output = model(batch_of(2, rank), die if rank == victim else None)
        began = time.monotonic()
        output.square().sum().backward()
    except ddpx.Error as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "no error", "", 0.0


@pytest.mark.parametrize(
    ("transport", "algorithm", "world_size", "victim"),
    [
        *[(transport, algorithm, 3, 1) for transport in TRANSPORTS for algorithm in ("direct", "ring", "tree")],
        ("hierarchical", "auto", 4, 1),
        ("hierarchical", "auto", 4, 3),  # the second one of its host
    ],
)
def test_a_rank_killed_in_backward_is_named_with_the_bucket_on_all_others(
    transport: str, algorithm: str, world_size: int, victim: int
) -> None:
    outcomes = attempt(killed_in_backward, world_size, transport, algorithm, victim)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for rank in set(range(world_size)) - {victim}:
        assert outcomes[rank].error is None, outcomes[rank].error
        kind, words, seconds = outcomes[rank].value
        assert kind in ("PeerLost", "PeerFailed"), kind
        assert f"rank {victim} is gone" in words and "bucket" in words and "layers." in words, words
        assert seconds < 5


def killed_before_its_first_note(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 dies while it checks its model, when nobody shares memory or a connection with it yet."""
    group = ddpx.group.Group(timeout_s=20)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.gather("model fingerprint", "")
    except ddpx.Error as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.processes
def test_a_rank_killed_in_construction_is_named_at_once() -> None:
    outcomes = attempt(killed_before_its_first_note, 3, timeout_s=15)  # sooner than the deadline of 20 s
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert outcomes[rank].value[0] == "PeerLost" and "rank 1 is gone" in outcomes[rank].value[1]


def killed_before_it_reconnects(rank: int, world_size: int) -> tuple[str, str]:
    model = wrapped(rank, "process_group", timeout_s=20)
    with contextlib.suppress(KeyError, ddpx.PeerFailed):
        model(batch_of(0, rank), boom if rank == 1 else None).square().sum().backward()
    if rank == 1:
        time.sleep(0.3)  # its peers are waiting for it to connect again
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(batch_of(1, rank)).square().sum().backward()
    except ddpx.Error as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.processes
def test_a_rank_killed_while_its_peers_reconnect_is_named_at_once() -> None:
    outcomes = attempt(killed_before_it_reconnects, 3, timeout_s=15)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert outcomes[rank].value[0] in ("PeerLost", "PeerFailed"), outcomes[rank].value
        assert "rank 1 is gone" in outcomes[rank].value[1]


SCRIPT = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
import ddpx

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
torch.manual_seed(0)
layers = [torch.nn.Linear(50, 50) for _ in range(6)]
model = ddpx.DDPX(torch.nn.Sequential(*layers), bucket_cap_mb=0.005, transport=sys.argv[1])
if sys.argv[2] == f"kill {rank}":
    layers[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
for step in range(5):
    try:
        if sys.argv[2] == "recover" and rank == 1 and step == 2:
            handle = layers[2].weight.register_hook(lambda _: 1 / 0)
        model(torch.randn(3, 50)).sum().backward()
        assert not (sys.argv[2] == "recover" and step == 2), "this step fails"
    except (ZeroDivisionError, ddpx.PeerFailed) as error:
        assert sys.argv[2] == "recover" and step == 2, error
        if rank == 1:
            handle.remove()
if sys.argv[2] == "recover":
    dist.barrier()
    dist.destroy_process_group()
print(f"rank {rank} ended")
"""


def run_script(tmp_path: Path, transport: str, what: str, world_size: int) -> list[tuple[int, str]]:
    """(exit code, output) of each rank of SCRIPT, started as torchrun would."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    processes = []
    for rank in range(world_size):
        variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in variables.items()}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), transport, what]
        cwd = Path(ddpx.__file__).parent.parent
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(command, env=env, text=True, cwd=cwd, **pipes))
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=90)
            results.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "killed"), [("shared_memory", 1), ("process_group", 0)]
)  # rank 0 keeps the store
def test_a_job_with_a_killed_rank_ends_with_its_name_and_a_non_zero_code(
    tmp_path: Path, transport: str, killed: int
) -> None:
    results = run_script(tmp_path, transport, f"kill {killed}", 2)
    assert results[killed][0] == -signal.SIGKILL
    code, output = results[1 - killed]
    assert code == 1, output
    assert "ddpx.errors.PeerLost" in output and f"rank {killed} is gone" in output, output


@pytest.mark.processes
@pytest.mark.parametrize(("transport", "world_size"), [("shared_memory", 2), ("process_group", 3)])
def test_a_job_that_recovered_from_a_failure_ends_with_code_0(tmp_path: Path, transport: str, world_size: int) -> None:
    results = run_script(tmp_path, transport, "recover", world_size)
    assert [code for code, _ in results] == [0] * world_size, results
    assert [output.strip() for _, output in results] == [f"rank {rank} ended" for rank in range(world_size)]


# ---- A rank raises ---------------------------------------------------------------------------------------------------

FAILURES = [(1, FORWARD), (0, 4), (2, 7), (1, 0), (2, FORWARD), (0, 2)]  # (rank, place), step by step


def raising(rank: int, world_size: int, transport: str, algorithm: str, mode: str) -> list[tuple[str, str, float]]:
    """One rank after another raises in its forward or backward. What each step said here; good steps are checked."""
    model = DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport, algorithm=algorithm, mode=mode)
    model(batch_of(0, rank)).square().sum().backward()
    seen = []
    for step, (failing, at) in enumerate(FAILURES):
        model.zero_grad()
        trip = boom if rank == failing else None
        before = time.monotonic()
        try:
            model(batch_of(step, rank), trip, at).square().sum().backward()
            seen.append(("nothing", "", 0.0))
        except (ddpx.Error, KeyError) as error:
            seen.append((type(error).__name__, str(error), time.monotonic() - before))
        model.zero_grad()
        model(batch_of(step, rank)).square().sum().backward()
        assert_right(model, world_size, step)
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("algorithm", "mode"), [("direct", "overlapped"), ("ring", "overlapped"), ("ring", "naive"), ("tree", "bucketed")]
)
def test_an_exception_on_one_rank_is_told_on_the_others_and_the_next_step_is_right(
    ranks, transport: str, algorithm: str, mode: str
) -> None:
    seen = ranks(3).run(raising, transport, algorithm, mode, timeout_s=120)
    for step, (failing, at) in enumerate(FAILURES):
        place = "forward" if at == FORWARD else "backward"
        for rank in range(3):
            kind, words, seconds = seen[rank][step]
            if rank == failing:
                assert kind == "KeyError", (step, rank, kind, words)
            else:
                assert kind == "PeerFailed" and f"rank {failing} failed in its {place}" in words, (step, kind, words)
                assert "KeyError" in words or place == "backward"
            assert seconds < 5, (step, rank, seconds)


def many_failures(rank: int, world_size: int, transport: str, seed: int, rounds: int) -> list[float]:
    """Failures at random, several ranks at once too, with ranks that dawdle; returns how long the failed steps took."""
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    algorithm = shared.choice(["direct", "ring", "tree", "doubling", "halving_doubling"])
    mode = shared.choice(["naive", "bucketed", "overlapped"])
    model = wrapped(rank, transport, algorithm=algorithm, mode=mode)
    took = []
    for step in range(rounds):
        failing = {peer: shared.randint(-1, 6) for peer in range(world_size) if shared.random() < 0.3}
        if own.random() < 0.3:
            time.sleep(own.random() * 0.02)
        model.zero_grad()
        before = time.monotonic()
        try:
            model(
                batch_of(step, rank), boom if rank in failing else None, failing.get(rank, 0)
            ).square().sum().backward()
            assert not failing, f"step {step} was to fail by {failing}"
            assert_right(model, world_size, step)
        except KeyError:
            assert rank in failing, step
        except ddpx.PeerFailed as error:
            assert any(f"rank {peer} failed in its" in str(error) for peer in failing), (step, failing, str(error))
        if failing:
            took.append(time.monotonic() - before)
    return took


@pytest.mark.parametrize(
    ("transport", "world_size"), [*[(name, n) for name in TRANSPORTS for n in (2, 3)], ("hierarchical", 4)]
)
def test_failures_at_random_are_recovered_from_again_and_again(ranks, transport: str, world_size: int) -> None:
    for seed in (1, 2):
        for took in ranks(world_size).run(many_failures, transport, seed, 12, timeout_s=120):
            assert max(took, default=0) < 5


class Forgotten:
    """A wait that does not end when its connection closes, but at its time limit."""

    def __init__(self, ending: Any) -> None:
        self.ending = ending

    def wait(self) -> None:
        try:
            self.ending.wait()
        except RuntimeError:
            time.sleep(8)
            raise


def forgotten_wait(rank: int, world_size: int) -> None:
    """Rank 1 waits for a message when rank 2 fails, and goes on waiting through the next step."""
    model = wrapped(rank, "process_group", timeout_s=5)
    model(batch_of(0, rank)).square().sum().backward()
    if rank == 1:
        connections = model.reducer.communicator.transport._connections
        posts = connections.posts

        def forgotten(*messages: Any) -> Any:
            for peer, post, sent, received in posts(*messages):
                yield peer, (lambda post=post: Forgotten(post())), sent, received

        connections.posts = forgotten
    with pytest.raises((KeyError, ddpx.PeerFailed)):
        model(batch_of(1, rank), boom if rank == 2 else None).square().sum().backward()
    model.zero_grad()
    model(batch_of(2, rank)).square().sum().backward()
    assert_right(model, world_size, 2)


def test_a_wait_that_closing_does_not_end_keeps_nobody_from_the_next_step(ranks) -> None:
    ranks(3).run(forgotten_wait)


def late_to_map(rank: int, world_size: int) -> str:
    """Rank 1 hears of a failure when it has mapped the arena of rank 0, which then comes to map that of rank 1."""
    model = wrapped(rank, "hierarchical", timeout_s=10)
    communicator = model.reducer.communicator
    board, local = communicator.group, communicator.transport.local.group
    gather, fail = local.gather, communicator.fail

    def until(topic: str) -> None:
        deadline = time.monotonic() + 10
        while board.left(topic, 1) is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def gather_in_turn(topic: str, value: Any) -> list[Any]:
        if rank == 1 and topic == "mapped arena":
            board.leave("has mapped", True)
        values = gather(topic, value)
        if rank == 0 and topic == "share arena":
            until("has left")
        return values

    def leave(message: str) -> None:
        board.leave("has left", True)
        fail(message)

    def trip() -> None:
        until("has mapped")
        boom()

    local.gather = gather_in_turn
    if rank == 1:
        communicator.fail = leave
    said = ""
    try:
        model(batch_of(0, rank), trip if rank == 3 else None, 0).square().sum().backward()
    except (ddpx.Error, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
    model.zero_grad()
    model(batch_of(1, rank)).square().sum().backward()
    assert_right(model, world_size, 1)
    return said


def test_a_peer_that_left_for_a_failure_is_no_obstacle_to_sharing_memory(ranks) -> None:
    *others, failed = ranks(4).run(late_to_map)
    assert failed.startswith("KeyError")
    for said in others:
        assert said.startswith("PeerFailed: rank 3 failed in its backward"), said


def first_step(rank: int, world_size: int, transport: str, failing: int) -> list[str]:
    """Rank `failing` raises in its first two backwards, while others begin to lay out the arena; then all is well."""
    model = DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport)
    seen = []
    for step in range(4):
        model.zero_grad()
        try:
            trip = boom if step < 2 and rank == failing else None
            model(batch_of(step, rank), trip).square().sum().backward()
            assert_right(model, world_size, step)
        except (ddpx.Error, KeyError) as error:
            seen.append(type(error).__name__)
    return seen


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_very_first_backward_may_fail(ranks, transport: str, failing: int) -> None:
    for rank, seen in enumerate(ranks(3).run(first_step, transport, failing)):
        assert seen == (["KeyError"] * 2 if rank == failing else ["PeerFailed"] * 2)


def slow_step_after(rank: int, world_size: int, transport: str) -> None:
    """The step after a failed one makes its peers wait long enough to look for failures, and meets no old one."""
    model = DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport)
    for step in range(4):
        model.zero_grad()
        if step == 1:
            with pytest.raises((KeyError, ddpx.PeerFailed)):
                model(batch_of(step, rank), boom if rank == 1 else None).square().sum().backward()
        else:
            trip = (lambda: time.sleep(0.5)) if rank == 1 else None
            model(batch_of(step, rank), trip).square().sum().backward()
            assert_right(model, world_size, step)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failure_is_over_when_the_next_step_begins(ranks, transport: str) -> None:
    ranks(3).run(slow_step_after, transport)


def after_the_last_bucket(rank: int, world_size: int, transport: str) -> tuple[str, str]:
    """Rank 1 raises when its last bucket is on its way, so its peers may well end that step; what the next one says."""
    model = DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport, timeout_s=10)
    model(batch_of(0, rank)).square().sum().backward()
    ended = True
    try:
        model(batch_of(1, rank), boom if rank == 1 else None, AFTER_ALL).square().sum().backward()
    except (ddpx.Error, KeyError) as error:
        ended = False
        assert rank == 1 or "rank 1 failed in its backward" in str(error), error
    try:
        model(batch_of(2, rank)).square().sum().backward()
    except ddpx.Error as error:
        return type(error).__name__, str(error)
    return "nothing" if ended else "failed together", ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_never_go_on_when_only_some_ended_a_step(ranks, transport: str) -> None:
    for _ in range(3):
        found = ranks(2).run(after_the_last_bucket, transport)
        assert found[0][0] == found[1][0] == "failed together" or all(
            kind in ("Mismatch", "PeerFailed", "PeerLost") for kind, _ in found
        ), found


def leaks(rank: int, world_size: int, transport: str) -> list[tuple[int, int]]:
    """Shared mappings and threads of ours after wrappers that saw failures were dropped."""
    import gc
    import threading

    counts = []
    for _ in range(3):
        model = DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport)
        for step in range(4):
            with contextlib.suppress(KeyError, ddpx.PeerFailed):
                model(batch_of(step, rank), boom if rank == 1 and step % 2 else None).square().sum().backward()
        del model
        gc.collect()
        threads = sum(thread.name.startswith("ddpx") for thread in threading.enumerate())
        counts.append((Path("/proc/self/maps").read_text().count("memfd:ddpx"), threads))
    return counts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failures_leave_no_memory_and_no_threads(transport: str) -> None:
    for counts in run(leaks, 2, transport):  # processes of their own, in which no other test has left anything
        mappings, threads = zip(*counts)
        assert mappings[-1] == 0 and threads[-1] <= threads[0], counts


# ---- A rank does not come --------------------------------------------------------------------------------------------


def sleeping(rank: int, world_size: int, transport: str) -> tuple[str, str]:
    model = DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport, timeout_s=2)
    for step in range(2):
        model.zero_grad()
        model(batch_of(step, rank)).square().sum().backward()
    try:
        model(batch_of(2, rank), (lambda: time.sleep(6)) if rank == 1 else None).square().sum().backward()
    except ddpx.Error as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_sleeps_is_named_at_the_deadline_with_the_bucket(ranks, transport: str) -> None:
    found = ranks(3).run(sleeping, transport)
    for rank in (0, 2):
        kind, words = found[rank]
        assert kind in ("DeadlineExceeded", "PeerFailed"), (kind, words)  # whoever was first tells the other
        assert "waited 2 s for rank 1" in words and "bucket" in words and "layers." in words, words
    assert found[1][0] == "PeerFailed"


class WithBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


def extra_forward(rank: int, world_size: int, transport: str, module: type[Model], what: str) -> str:
    """Rank 1 runs a forward more than the others, which it drops, or a backward more, or skips a backward."""
    model = DDPX(module(), bucket_cap_mb=TINY_MB, transport=transport, timeout_s=10)
    loss = torch.zeros(())
    for step in range(4):
        model.zero_grad()
        if rank == 1 and step == 1:
            model.train(what == "trains")
            if what == "fails":
                with pytest.raises(KeyError):
                    model(batch_of(5, rank), boom, FORWARD)
            elif what != "skips":
                model(batch_of(5, rank))
            model.train()
        try:
            loss = model(batch_of(step, rank)).square().sum()
            if rank == 1 and step == 1 and what == "skips":
                continue
            if rank == 1 and step == 1 and what == "goes back twice":
                loss.backward(retain_graph=True)
            loss.backward()
        except ddpx.Error as error:
            return str(error)
        if module is Model and what not in ("goes back twice", "skips"):
            assert_right(model, world_size, step)
    return ""


@pytest.mark.parametrize("what", ["trains", "evaluates", "fails"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_forward_that_one_rank_drops_is_no_affair_of_the_others(ranks, transport: str, what: str) -> None:
    assert ranks(2).run(extra_forward, transport, Model, what) == ["", ""]


@pytest.mark.parametrize(
    ("module", "what", "words"),
    [
        (WithBuffer, "trains", "rank 1 is in a forward, sharing buffers"),
        (Model, "skips", "gradients of different steps would be averaged"),
        (Model, "goes back twice", "rank 1 runs another backward through the forwards of its last one"),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_are_out_of_step_are_told(ranks, transport: str, module: type[Model], what: str, words: str) -> None:
    for said in ranks(2).run(extra_forward, transport, module, what):
        assert "ranks are out of step" in said and words in said, said


# ---- Models that do not fit ------------------------------------------------------------------------------------------


def mismatched(rank: int, world_size: int, case: str) -> tuple[str, str]:
    layers: list[nn.Module] = [nn.Linear(3, 4), nn.Linear(4, 2)]
    if rank == 1:
        if case == "count":
            layers.append(nn.Linear(2, 2))
        elif case == "shape":
            layers[1] = nn.Linear(4, 3)
        elif case == "dtype":
            layers[1].to(torch.float64)
        elif case == "stride":
            layers[0].weight.data = layers[0].weight.data.t().contiguous().t()
        elif case == "frozen":
            layers[1].requires_grad_(False)
        elif case == "buffers":
            layers[1].register_buffer("extra", torch.zeros(3))
        elif case == "mode":
            pass
    try:
        DDPX(nn.Sequential(*layers), mode="naive" if case == "mode" and rank == 1 else "overlapped")
    except ddpx.Mismatch as error:
        return "Mismatch", str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("count", "Rank 1 has 6 params, while rank 0 has inconsistent 4 params"),
        ("shape", "1.weight [2, 4] stride [4, 1] torch.float32, rank 1 has 1.weight [3, 4]"),
        ("dtype", "rank 1 has 1.weight [2, 4] stride [4, 1] torch.float64"),
        ("stride", "rank 1 has 0.weight [4, 3] stride [1, 4]"),
        ("frozen", "rank 1 has 1.weight [2, 4] stride [4, 1] torch.float32 not trained"),
        ("buffers", "buffer"),
        ("mode", "mode"),
    ],
)
def test_ranks_with_different_models_are_told_the_first_difference_on_every_rank(ranks, case: str, words: str) -> None:
    found = ranks(3).run(mismatched, case)
    for kind, text in found:
        assert kind == "Mismatch" and words in text, text


def constructed_on_some(rank: int, world_size: int) -> str:
    """Rank 1 never gets to the constructor."""
    if rank == 1:
        time.sleep(3.5)
        return ""
    with pytest.raises(ddpx.DeadlineExceeded) as raised:
        DDPX(Model(), timeout_s=2)
    return str(raised.value)


@pytest.mark.processes
def test_a_rank_missing_at_construction_is_named() -> None:
    words = run(constructed_on_some, 3)  # on processes of their own: rank 1 is a wrapper behind from here on
    assert all("waited 2 s for rank 1" in words[rank] for rank in (0, 2))


def failed_construction(rank: int, world_size: int, transport: str) -> tuple[str, str]:
    """Rank 1 is out of memory when the reducer is made; the others are told, whether they wait in it or later."""
    failing = contextlib.nullcontext()
    if rank == 1:
        failing = unittest.mock.patch("ddpx.data_parallel.DDPReducer", side_effect=MemoryError("no memory"))
    try:
        with failing:
            model = wrapped(rank, transport, timeout_s=20)
        model(batch_of(0, rank)).square().sum().backward()
    except (ddpx.Error, MemoryError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_constructor_that_fails_on_one_rank_is_told_on_the_others(ranks, transport: str) -> None:
    found = ranks(3).run(failed_construction, transport, timeout_s=15)
    assert [kind for kind, _ in found] == ["PeerFailed", "MemoryError", "PeerFailed"]
    for rank in (0, 2):
        assert "rank 1 failed in constructing its DDPX: MemoryError: no memory" in found[rank][1], found[rank]


# ---- Parameters without gradients ------------------------------------------------------------------------------------


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.sometimes(self.always(x)) if use else self.always(x)


def unused(rank: int, world_size: int, transport: str, first: bool) -> list[str]:
    """Rank 1 leaves a layer out in the first, or in the second, backward; the next is right again."""
    model = DDPX(Conditional(), transport=transport)
    x = torch.ones(2, 5)
    if not first:
        model(x, True).sum().backward()
    words = []
    try:
        model(x, rank != 1).sum().backward()
    except ddpx.Error as error:
        words = [type(error).__name__, str(error)]
    model.zero_grad()
    model(x, True).sum().backward()
    assert torch.equal(model.module.sometimes.bias.grad, torch.full((5,), 2.0))
    return words


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_parameter_without_a_gradient_is_named_on_every_rank_at_once(ranks, transport: str, first: bool) -> None:
    found = ranks(3).run(unused, transport, first)
    assert [kind for kind, _ in found] == ["PeerFailed", "UnusedParameters", "PeerFailed"]
    for _, words in found:
        assert words.startswith("Expected to have finished reduction in the prior iteration"), words
        assert "sometimes.weight, sometimes.bias" in words and "on rank 1" in words


def told_late(rank: int, world_size: int, transport: str) -> tuple[str, str]:
    """Rank 1 fails in its forward and is held up just before it says so; what rank 0 hears."""
    model = DDPX(Model(), bucket_cap_mb=TINY_MB, transport=transport)
    model(batch_of(0, rank)).square().sum().backward()
    if rank == 1:
        tell = model.reducer.communicator.fail

        def tell_late(message: str) -> None:
            time.sleep(0.5)
            tell(message)

        model.reducer.communicator.fail = tell_late
    try:
        model(batch_of(1, rank), boom if rank == 1 else None, FORWARD).square().sum().backward()
    except (ddpx.Error, KeyError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_forward_is_never_taken_for_ranks_out_of_step(ranks, transport: str) -> None:
    heard, raised = ranks(2).run(told_late, transport)
    assert raised[0] == "KeyError"
    assert heard[0] == "PeerFailed" and "rank 1 failed in its forward" in heard[1], heard
