"""Lightning with ddpx: a strategy that wraps the model in DDPX; all else is Lightning's DDPStrategy.

torchrun --nproc-per-node 2 examples/lightning_recipe.py
python examples/lightning_recipe.py --devices 2
"""

import argparse
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpx import DDPX


class DDPXStrategy(DDPStrategy):
    """DDPStrategy with DDPX in the place of DistributedDataParallel; keyword arguments go to it."""

    def _setup_model(self, model: nn.Module) -> Any:
        return DDPX(module=model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    strategy = DDPXStrategy(process_group_backend=None if torch.cuda.is_available() else "gloo", bucket_cap_mb=1)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=arguments.devices,
        strategy=strategy,
        max_epochs=3,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")
        print("done")


if __name__ == "__main__":
    main()
