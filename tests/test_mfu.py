"""FLOPs counted and computed agree; a GPU's name finds its own peak or none."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import models
from ddpx.mfu import (
    ModelFlops,
    Peak,
    count_flops,
    format_mfu,
    gpu_peak,
    higher_peak,
    job_peak,
    measure_gemm_peak,
    mfu,
    palm_flops_per_token,
)
from models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=4, heads=4, width=256, vocab_size=256, block_size=256)


def gpt_flops(config: GPTConfig, batch: int) -> ModelFlops:
    model = GPT(config)
    tokens = torch.zeros(batch, config.block_size, dtype=torch.long)
    per_token = palm_flops_per_token(
        model.matmul_parameters(), config.layers, config.heads, config.head_dim, config.block_size
    )
    return ModelFlops(count_flops(model, tokens, tokens), per_token * tokens.numel())


def test_palm_formula_of_a_small_gpt_by_hand() -> None:
    assert palm_flops_per_token(n=10, layers=2, heads=3, head_dim=4, sequence=5) == 60 + 1440


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "manual"])
def test_formula_and_counter_agree_for_either_attention(attention: str, tied: bool) -> None:
    flops = gpt_flops(replace(CONFIG, attention=attention, tied=tied), batch=2)
    assert 0 < flops.formula - flops.counted < 0.02 * flops.counted  # LayerNorms and biases are in N, not in the count
    assert flops.per_batch == flops.formula
    assert flops.convention == "PaLM 6N + 12LHQT, causal attention in full"


def test_the_counter_alone_would_miss_the_attention_of_the_cpu() -> None:
    """The reason for counting on the meta device; if torch learns to count it, this control says so."""
    from torch.utils.flop_counter import FlopCounterMode

    model, tokens = GPT(CONFIG), torch.zeros(2, 256, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)[1].backward()
    assert counter.get_total_flops() < 0.9 * count_flops(model, tokens, tokens)


def test_a_disagreement_shows_both_figures() -> None:
    assert "103.000 GFLOP; counted 100.000 GFLOP (+3.0%)" in ModelFlops(100 * 10**9, 103 * 10**9).convention
    assert "counted" not in ModelFlops(100 * 10**9, 102 * 10**9).convention


def test_count_of_a_linear_layer_is_its_three_products() -> None:
    class Sum(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    data = torch.zeros(5, 7)
    assert count_flops(Sum(7, 3), data) == 2 * (2 * 5 * 7 * 3)  # forward, gradient of the weight; the input wants none


@pytest.mark.parametrize("name", models.MODELS)
def test_counting_changes_nothing(name: str) -> None:
    model = models.build(name, "nano", block_size=8)
    inputs = torch.zeros(2, 3, 32, 32) if name == "resnet" else torch.zeros(2, 8, dtype=torch.long)
    targets = torch.zeros(2, dtype=torch.long) if name == "resnet" else inputs
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    flops = ModelFlops(count_flops(model, inputs, targets))
    assert flops.per_batch > 0
    assert "FlopCounterMode" in flops.convention
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_resnet18_counts_what_is_published_for_it() -> None:
    """0.56 G multiply-adds a 32 x 32 image forward; backward twice that, less the gradient of the image."""
    model = models.build("resnet", "small")
    flops = count_flops(model, torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))
    assert flops == pytest.approx(3 * 2 * 0.556e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float16, 312),
        ("A100-PCIE-40GB", torch.float32, 19.5),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.bfloat16, 835),  # 1671 with sparsity
        ("NVIDIA H200", torch.bfloat16, 989.4),  # 1979 with sparsity
        ("NVIDIA H200 NVL", torch.bfloat16, 836),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),  # 330 with fp16 accumulation, 82.6 without tensor cores
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla T4", torch.float16, 65),
        ("AMD Instinct MI300X", torch.bfloat16, 1307),
    ],
)
def test_a_gpu_has_its_own_dense_peak(name: str, dtype: torch.dtype, tera: float) -> None:
    assert gpu_peak(name, dtype) == Peak(pytest.approx(tera * 1e12), "datasheet")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA L40",
        "NVIDIA A10G",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H800",
        "NVIDIA H20",
        "Tesla V100-PCIE-16GB",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX 6000 Ada Generation",
        "Some GPU of 2031",
    ],
)
def test_a_gpu_that_only_looks_like_a_known_one_has_no_peak(name: str) -> None:
    assert gpu_peak(name, torch.bfloat16) is None


def test_a_peak_depends_on_the_arithmetic() -> None:
    assert gpu_peak("NVIDIA H200", torch.float32) == Peak(66.9e12, "datasheet")
    assert gpu_peak("NVIDIA H200", torch.float32, tf32=True) == Peak(pytest.approx(494.7e12), "datasheet")
    assert gpu_peak("NVIDIA H200", torch.float64) is None
    assert gpu_peak("Tesla T4", torch.bfloat16) is None  # no tensor cores for it
    assert gpu_peak("NVIDIA B200", torch.float32) is None


def test_measured_peak_waits_for_all_ranks_at_each_size_and_sums_over_them() -> None:
    calls: list[str] = []

    def double(value: float) -> float:
        calls.append("sum")
        return 2 * value

    peak = measure_gemm_peak(
        seconds=0.02, sizes=(32, 64), barrier=lambda: calls.append("barrier"), sum_over_ranks=double
    )
    assert calls == ["barrier", "barrier", "sum"]
    assert peak.source == "measured-gemm"
    assert peak.flops > 1e6
    assert peak.label == "MFU vs measured GEMM peak"
    with pytest.raises(ValueError, match="positive time"):
        measure_gemm_peak(seconds=0)


def test_the_peak_of_a_job_is_the_users_the_tables_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert job_peak(cpu, torch.float32, device_tflops=0.5, sum_over_ranks=lambda x: 3 * x) == Peak(1.5e12, "user")
    assert job_peak(cpu, torch.float32, seconds=0.01).source == "measured-gemm"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert job_peak(gpu, torch.bfloat16, sum_over_ranks=lambda x: 2 * x) == Peak(242e12, "datasheet")
    assert job_peak(gpu, torch.bfloat16, sum_over_ranks=lambda x: x + math.nan) is None  # a rank with an unknown GPU
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU of 2031")
    assert job_peak(gpu, torch.bfloat16) is None


def test_the_higher_peak_is_kept_and_a_drift_is_told() -> None:
    slow, quick, quicker = (Peak(flops, "measured-gemm") for flops in (80e9, 100e9, 105e9))
    assert higher_peak(quick, quicker) == (quicker, None)
    for pair in ((slow, quick), (quick, slow)):
        peak, warning = higher_peak(*pair)
        assert peak is quick
        assert "GFLOP/s during the run" in warning
    assert "from 100 to 80 GFLOP/s" in warning


def test_mfu_is_the_share_of_the_peak_or_not_available() -> None:
    peak = Peak(200.0, "user")
    assert mfu(100.0, 2.0, peak) == 0.25
    assert mfu(100.0, 2.0, None) is None
    assert [format_mfu(value) for value in (0.25, None, 1.5)] == ["25.0%", "n/a", "150.0% (!)"]
    assert peak.label == "MFU (user peak)"
