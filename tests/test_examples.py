"""Each example runs on two CPU ranks, as its docstring says, and trains."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "nanogpt_style": None,
    "accelerate_recipe": "accelerate",
    "trainer_recipe": "transformers",
    "lightning_recipe": "lightning",
}


def launch(example: str, timeout_s: float = 150) -> str:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / f"{example}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_trains_on_two_ranks(example) -> None:
    needed = EXAMPLES[example]
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install '.[examples]'")
    assert "done" in launch(example).splitlines()[-1]
