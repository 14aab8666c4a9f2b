"""torch's own tests of DistributedDataParallel, which ship in its wheel, run with our class in the place of torch's.

    python tests/torch_ddp_suite.py                      both classes, on gloo, two ranks; the tests that need no GPU
    python tests/torch_ddp_suite.py --on-cpu             and those that want GPUs, with their devices read as the CPU
    python tests/torch_ddp_suite.py --only test_ddp_device --show
    python tests/torch_ddp_suite.py --on-cpu --only unused --forgive-first

Each test runs in two fresh processes; the class is swapped in each of them before the test begins. A test counts
against us when it passes with torch's class and not with ours; EXCEPTIONS has the reasons of those we know. With
--forgive-first, the first error about unused parameters passes unseen with ours, as it does with DDP; so tests that
want it one iteration later run on, and read what it says (three want it to tell of TORCH_DISTRIBUTED_DEBUG, which ours
does not need: it has the names at every level). Needs `expecttest`, as torch's tests do.
"""

import argparse
import contextlib
import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

WORLD_SIZE = 2
CLASSES = ("torch", "ddpx")
EARLIER = "unused parameters are an error in the backward that leaves them out; the test wants it one iteration later"
# Public: what the test asks for can be seen without looking into DDP. Counted against us all the same.
PUBLIC_EXCEPTIONS: dict[str, str] = {
    "test_ddp_control_flow_different_across_ranks": EARLIER,
    "test_ddp_control_flow_same_across_ranks": EARLIER,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": EARLIER,
    "test_ddp_multiple_nested_unused_params_error": EARLIER,
    "test_ddp_unused_params_rebuild_buckets_exception": EARLIER,
    "test_ddp_logging_data_cpu": "expects gradient_as_bucket_view off by default, and DDP's buckets",
    "test_ddp_profiling_torch_profiler": "counts the process group's all-reduces; ours are not its",
}
PRIVATE_EXCEPTIONS: dict[str, str] = {
    "test_ddp_native_mixed_precision_ignored_params": "reads the private _mp_param of parameters",
    "test_skip_all_reduce_unused_parameters": "counts buckets; ours have a fixed size and may cut through a parameter",
    "test_different_graph_across_ranks": "wants has_rebuilt_buckets to be 0; ours are always laid out anew",
}
EXCEPTIONS = PUBLIC_EXCEPTIONS | PRIVATE_EXCEPTIONS
IMAGE, SMALL_IMAGE = 1000, 40  # a side of the images in test_ddp_uneven_inputs, too large to train on CPUs, and for us
PRELOAD = "DDPX_SUITE_PRELOAD"


# ---- In the child ----------------------------------------------------------------------------------------------------


def suite(on_cpu: bool) -> Any:
    """torch's test module, imported so that tests for GPUs do not skip themselves where `on_cpu`."""
    import torch.testing._internal.common_distributed as common

    if on_cpu:
        common.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
        common.nccl_skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
    import torch.testing._internal.distributed.distributed_test as tests

    return tests


def read_gpus_as_the_cpu() -> None:
    """Moves to a GPU do nothing, and a device number means the CPU."""
    import torch
    from torch import nn
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def place(value: Any) -> Any:
        is_gpu = type(value) is int or (isinstance(value, torch.device) and value.type == "cuda")
        return cpu if is_gpu or (isinstance(value, str) and value.startswith("cuda")) else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(function, "__name__", "")
            if name == "ones" and args[2:] == (IMAGE, IMAGE):
                args = (*args[:2], SMALL_IMAGE, SMALL_IMAGE)
            if name == "cuda":
                return args[0]
            if "device" in kwargs:
                kwargs["device"] = place(kwargs["device"])
            if name == "to" and len(args) > 1:
                args = (args[0], place(args[1]), *args[2:])
            return function(*args, **kwargs)

    OnCpu().__enter__()
    module_to = nn.Module.to
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment,method-assign]
    nn.Module.to = lambda self, *args, **kwargs: module_to(  # type: ignore[assignment,method-assign]
        self, *map(place, args), **{key: place(value) for key, value in kwargs.items()}
    )
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    for kind in classes():
        take_no_devices(kind)


def take_no_devices(kind: Any) -> None:
    construct = kind.__init__

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        construct(self, module, None, None, *args, **kw)

    init.__signature__ = inspect.signature(construct)  # type: ignore[attr-defined]
    kind.__init__ = init


def classes() -> tuple[Any, Any]:
    from torch.nn.parallel.distributed import DistributedDataParallel

    from ddpx import DDPX

    return DistributedDataParallel, DDPX


def swap(tests: Any) -> None:
    """Whoever asks torch for DistributedDataParallel gets DDPX."""
    import torch

    theirs, ours = classes()
    for module in (tests, torch.nn.parallel):
        for name, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, name, ours)


def forgive_first() -> None:
    """The first error about unused parameters of each wrapper is not raised."""
    from ddpx.errors import UnusedParameters
    from ddpx.reducer import Reducer

    end = Reducer._end
    forgiven: set[int] = set()

    def forgiving_end(self: Any) -> None:
        try:
            end(self)
        except UnusedParameters:
            if id(self) in forgiven:
                raise
            forgiven.add(id(self))

    Reducer._end = forgiving_end  # type: ignore[method-assign]


def child(
    pipe: Connection, name: str, which: str, on_cpu: bool, forgives: bool, rank: int, folder: str, log: str
) -> None:
    """Run one test on one rank, and send (status, reason)."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment(folder), RANK=str(rank))
    status, reason = "pass", ""
    try:
        import torch.distributed as dist

        tests = suite(on_cpu)
        if on_cpu:
            read_gpus_as_the_cpu()
        if which == "ddpx":
            swap(tests)
            if forgives:
                forgive_first()
        case = case_class(tests)(name)
        case.rank, case.file_name = rank, os.path.join(folder, "store")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{case.file_name}",
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=60),
        )
        getattr(case, name)()
    except unittest.SkipTest as skip:
        status, reason = "skip", str(skip)
    except SystemExit as leave:
        status, reason = ("skip", f"exit code {leave.code}") if leave.code else ("pass", "")
    except BaseException as error:
        status, reason = "fail", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    pipe.send((status, reason))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # stay connected until all ranks have answered
    os._exit(0)


def environment(folder: str) -> dict[str, str]:
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(WORLD_SIZE),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/store",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "OMP_NUM_THREADS": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "0",
    }


def case_class(tests: Any) -> Any:
    return type("Case", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})


# ---- In the parent ---------------------------------------------------------------------------------------------------


def ddp_tests(tests: Any) -> list[str]:
    """Tests of the suite that wrap a model, by themselves or in helpers they call."""
    base = tests.DistributedTest._DistTestBase
    found = []
    for name in dir(base):
        if name.startswith("test_") and _wraps(base, name, set()):
            found.append(name)
    return found


def _wraps(base: Any, name: str, seen: set[str]) -> bool:
    seen.add(name)
    try:
        source = inspect.getsource(inspect.unwrap(getattr(base, name)))
    except (TypeError, OSError):
        return False
    if re.search(r"DistributedDataParallel\(|\bDDP\(", source):
        return True
    helpers = set(re.findall(r"self\.(_\w+)", source)) - seen
    return any(hasattr(base, helper) and _wraps(base, helper, seen) for helper in helpers)


def run_one(
    context: Any, name: str, which: str, on_cpu: bool, forgives: bool, timeout_s: float
) -> tuple[str, str, str]:
    """Status, reason and output of one test with one class."""
    with tempfile.TemporaryDirectory(prefix="ddpx-suite-") as folder:
        for part in ("barrier", "test_dir"):
            os.mkdir(os.path.join(folder, part))
        open(os.path.join(folder, "lockfile"), "w").close()
        log = os.path.join(folder, "log")
        processes, pipes = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            settings = (name, which, on_cpu, forgives, rank, folder, log)
            process = context.Process(target=child, args=(theirs, *settings), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        deadline = time.monotonic() + timeout_s
        answers = []
        for pipe in pipes:
            try:
                ready = pipe.poll(max(0.0, deadline - time.monotonic()))
                answers.append(pipe.recv() if ready else ("fail", f"had not ended after {timeout_s:g} s"))
            except (EOFError, OSError):
                answers.append(("fail", "the process ended without an answer"))
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
        with open(log) as file:
            text = file.read()
    for wanted in ("fail", "skip"):
        for status, reason in answers:
            if status == wanted:
                return status, " ".join(reason.split())[:300], text
    return "pass", "", text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-cpu", action="store_true", help="run tests for GPUs too, on the CPU")
    parser.add_argument("--forgive-first", action="store_true", help="see above")
    parser.add_argument("--only", default="", help="a regular expression that names of tests have to match")
    parser.add_argument("--classes", default=",".join(CLASSES), help="torch, ddpx or both")
    parser.add_argument("--timeout-s", type=float, default=60, help="after which a test is ended")
    parser.add_argument("--show", action="store_true", help="print what failing tests wrote")
    parser.add_argument("--json", default="", help="write all results here")
    arguments = parser.parse_args()
    os.environ.update(environment(tempfile.gettempdir()))
    context = multiprocessing.get_context("forkserver")
    os.environ[PRELOAD] = "on_cpu" if arguments.on_cpu else "as_is"
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])
    context.set_forkserver_preload(["torch_ddp_suite"])
    names = [name for name in ddp_tests(suite(arguments.on_cpu)) if re.search(arguments.only, name)]
    which = arguments.classes.split(",")
    print(f"{len(names)} tests, {WORLD_SIZE} ranks, gloo, {'GPUs read as the CPU' if arguments.on_cpu else 'no GPU'}")
    results: dict[str, dict[str, tuple[str, str]]] = {}
    for name in names:
        results[name] = {}
        for kind in which:
            if results[name].get("torch", ("",))[0] == "skip":
                results[name][kind] = ("skip", "")
                continue
            status, reason, text = run_one(
                context, name, kind, arguments.on_cpu, arguments.forgive_first, arguments.timeout_s
            )
            results[name][kind] = (status, reason)
            if arguments.show and status == "fail":
                print(text)
        statuses = "  ".join(f"{kind} {results[name][kind][0]}" for kind in which)
        reasons = "  ".join(reason for _, reason in results[name].values() if reason)
        print(f"{statuses}  {name}  {reasons[:200]}", flush=True)
    for kind in which:
        print(f"{kind}: {dict(Counter(results[name][kind][0] for name in names))}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    return judge(results) if len(which) == 2 else 0


def judge(results: dict[str, dict[str, tuple[str, str]]]) -> int:
    """Print what torch's class passes and ours does not; the exit code."""
    passed = [name for name, row in results.items() if row["torch"][0] == "pass"]
    missing = [name for name in passed if results[name]["ddpx"][0] != "pass"]
    for name in missing:
        print(f"only torch's class passes {name}: {EXCEPTIONS.get(name, 'NO REASON GIVEN')}")
    extra = [name for name, row in results.items() if row["ddpx"][0] == "pass" and row["torch"][0] != "pass"]
    for name in extra:
        print(f"only ours passes {name}")
    _print_share("that torch's class passes", len(passed), len(missing))
    public = [name for name in passed if name not in PRIVATE_EXCEPTIONS or name not in missing]
    departs = [name for name in missing if name not in PRIVATE_EXCEPTIONS]
    _print_share("of these that do not look into DDP", len(public), len(departs))
    return int(any(name not in EXCEPTIONS for name in missing))


def _print_share(which: str, wanted: int, lacking: int) -> None:
    share = 1 - lacking / wanted if wanted else 1.0
    print(f"of {wanted} {which}, ours passes {wanted - lacking} ({share:.1%})")


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "torch_ddp_suite" and PRELOAD in os.environ:
    # In the fork server: imported once, so that each test's processes start at once.
    import ddpx  # noqa: F401

    suite(os.environ[PRELOAD] == "on_cpu")
