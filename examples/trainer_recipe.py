"""Hugging Face's Trainer with ddpx: the Trainer asks torch for DistributedDataParallel, so name ours there.

    torchrun --nproc-per-node 2 examples/trainer_recipe.py

The one line has to stand before the Trainer is made. `ddp_find_unused_parameters`, `ddp_bucket_cap_mb` and
`ddp_broadcast_buffers` of TrainingArguments reach DDPX as they reach DistributedDataParallel.
"""

import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ddpx import DDPX

torch.nn.parallel.DistributedDataParallel = DDPX  # type: ignore[misc]


class Regression(nn.Module):
    """What the Trainer wants of a model: a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.net(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Look(TrainerCallback):
    """Remembers what the Trainer has wrapped the model in."""

    wrapper: nn.Module | None = None

    def on_step_end(self, args, state, control, **kwargs) -> None:
        Look.wrapper = trainer.model_wrapped


torch.manual_seed(0)
inputs = torch.randn(256, 8)
rows = [{"x": x, "labels": x.sum().reshape(1)} for x in inputs]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=Regression(),
        args=TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            logging_steps=4,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        callbacks=[Look()],
    )
    result = trainer.train()
distributed = torch.distributed.is_initialized()
assert not distributed or isinstance(Look.wrapper, DDPX), f"the Trainer wrapped the model in {type(Look.wrapper)}"
if trainer.is_world_process_zero():
    print(f"loss {result.training_loss:.4f}")
    print("done")
if distributed:
    torch.distributed.destroy_process_group()
