"""The pure layer imports neither torch nor numpy; the simulator does without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# ddpx/__init__.py offers the training side too, which needs torch; so the modules are loaded below a bare package.
PRELUDE = """
import sys, types
for name in {blocked!r}:
    sys.modules[name] = None
package = types.ModuleType("ddpx")
package.__path__ = [{path!r}]
sys.modules["ddpx"] = package
"""


def run_without(blocked: list[str], code: str) -> str:
    prelude = PRELUDE.format(blocked=blocked, path=str(ROOT / "ddpx"))
    done = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_schedules_are_built_proved_and_priced_without_torch_and_numpy():
    out = run_without(
        ["torch", "numpy"],
        """
from ddpx.algorithms import ALGORITHMS, build
from ddpx.cost import Fabric, choose, count
from ddpx.schedule import chunk_bounds
from ddpx.verify import verify
for collective, algorithms in ALGORITHMS.items():
    for algorithm in algorithms:
        verify(build(collective, algorithm, 6))
print(count(build("all_reduce", "ring", 4), 8).sent, choose(64, 1e9, Fabric(1e-5, 2e-11)).algorithm)
""",
    )
    assert out.startswith("(12, 12, 12, 12)")


def test_the_simulator_runs_without_torch():
    pytest.importorskip("numpy")
    out = run_without(
        ["torch"],
        """
import numpy as np
from ddpx.algorithms import build
from ddpx.simulate import simulate
print(simulate(build("all_reduce", "ring", 3), [np.arange(5)] * 3).outputs[2].tolist())
""",
    )
    assert out.strip() == "[0, 3, 6, 9, 12]"


def test_the_block_works():
    with pytest.raises(AssertionError, match="numpy"):
        run_without(["torch", "numpy"], "import ddpx.simulate")
