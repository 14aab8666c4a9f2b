"""The GPU check runs here too, on the thread stream: what it asks of a GPU is at least asked of a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.processes
def test_the_gpu_check_passes_on_the_thread_stream(tmp_path):
    out = tmp_path / "gpu_check.json"
    script = Path(__file__).with_name("gpu_check.py")
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--out", str(out)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["ranks"]
    assert len(results) == 2
    assert all(set(checks) == {"stream order", "host free", "three modes", "trace"} for checks in results)
    assert "FAILED" not in done.stdout
