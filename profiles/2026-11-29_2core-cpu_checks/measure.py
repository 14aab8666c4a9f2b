"""What the checks that are always on cost, beside a step of the small GPT. Two CPU ranks.

torchrun --nproc-per-node 2 profiles/2026-11-29_2core-cpu_checks/measure.py
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

from ddpx import DDPX
from ddpx.drift import EVERY
from models.gpt import GPT

STEPS, CHECKS = 6, 30


def seconds(run: Callable[[], object], times: int) -> float:
    """The median of `times` runs."""
    found = []
    for _ in range(times):
        before = time.perf_counter()
        run()
        found.append(time.perf_counter() - before)
    return statistics.median(found)


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = DDPX(GPT.from_size("small", vocab_size=256, block_size=128))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
tokens = torch.randint(256, (1, 128))


def step() -> None:
    optimizer.zero_grad()
    model(tokens, tokens)[1].backward()
    optimizer.step()


replicas = model.reducer._replicas
assert replicas is not None


def compare_replicas() -> None:
    model.reducer.enter(2 << 32)
    replicas.start(0, 0)  # epoch 0: a check is due
    replicas.finish()


step()
step_s = seconds(step, STEPS)
numbers = {
    "step_s": step_s,
    "parameters_unchanged_s": seconds(model._check_parameters, CHECKS),
    "replicas_once_s": seconds(compare_replicas, CHECKS),
    "local_step_guard_s": seconds(model.reducer.local_now, CHECKS),
}
numbers["replicas_a_step_s"] = numbers["replicas_once_s"] / EVERY
total = numbers["parameters_unchanged_s"] + numbers["replicas_a_step_s"] + numbers["local_step_guard_s"]
numbers["share_of_a_step"] = total / step_s
if dist.get_rank() == 0:
    print(json.dumps(numbers, indent=1))
dist.destroy_process_group()
