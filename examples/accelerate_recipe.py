"""Hugging Face Accelerate with ddpx: wrap the model yourself, and let Accelerate prepare all the rest.

    torchrun --nproc-per-node 2 examples/accelerate_recipe.py

Accelerate wraps what it is given to train in DistributedDataParallel; `evaluation_mode=True` tells it not to.
`accumulate`, `no_sync`, `clip_grad_norm_` and `unwrap_model` work as ever, since a DDPX is an instance of torch's
class.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpx import DDPX

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(accelerator.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

model = DDPX(model)
model = accelerator.prepare_model(model, evaluation_mode=True)
optimizer, loader = accelerator.prepare(optimizer, DataLoader(TensorDataset(inputs, targets), batch_size=16))

model.train()
for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")

inner = accelerator.unwrap_model(model)
assert not isinstance(inner, DDPX)
total = sum(param.detach().double().sum() for param in inner.parameters()).reshape(1)
assert len(set(accelerator.gather(total).tolist())) == 1, "replicas differ"
accelerator.print("done")
accelerator.end_training()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
