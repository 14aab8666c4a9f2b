"""A training loop as nanoGPT writes it; two lines differ from its DistributedDataParallel version, and are marked.

python examples/nanogpt_style.py
torchrun --nproc-per-node 2 examples/nanogpt_style.py --steps 20
"""

import argparse
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from ddpx import DDPX  # was: from torch.nn.parallel import DistributedDataParallel as DDP
from models.gpt import GPT, GPTConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
arguments = parser.parse_args()

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
rank = dist.get_rank() if ddp else 0
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() and ddp else "cpu"

torch.manual_seed(1337)
model: torch.nn.Module = GPT(GPTConfig(layers=2, heads=2, width=32, block_size=32)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if ddp:
    model = DDPX(model)  # was: DDP(model, device_ids=[ddp_local_rank])
raw_model = model.module if ddp else model

text = (b"to be, or not to be, that is the question: " * 64)[:2048]
tokens = torch.tensor(list(text), device=device)
generator = torch.Generator().manual_seed(rank)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(tokens) - 33, (8,), generator=generator)
    rows = torch.stack([tokens[start : start + 33] for start in starts])
    return rows[:, :-1], rows[:, 1:]


for step in range(arguments.steps):
    for micro_step in range(arguments.accumulate):
        if ddp:
            # Gradients are reduced at the last micro-batch alone; no_sync() would do the same.
            model.require_backward_grad_sync = micro_step == arguments.accumulate - 1
        with nullcontext():
            x, y = get_batch()
            _, loss = model(x, y)
            loss = loss / arguments.accumulate
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0 and (step % 5 == 0 or step == arguments.steps - 1):
        print(f"step {step}: loss {loss.item() * arguments.accumulate:.4f}, gradient norm {norm:.4f}")

total = sum(param.detach().double().sum() for param in raw_model.parameters())
if ddp:
    totals = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    assert all(torch.equal(total, other) for other in totals), "replicas differ"
    dist.destroy_process_group()
if rank == 0:
    print("done")
