"""Model FLOPs utilisation: the floating-point operations that a model needs, over what the devices could have done.

    MFU = FLOPs of a global step / (seconds of the step × peak FLOP/s of all ranks together)

A multiplication and the addition after it are two FLOPs. What is needed counts, not what is done: work repeated by
activation checkpointing is left out (with it, the figure would be hardware utilisation). The numerator is the same in
every mode of one run, so a ratio of MFUs is a ratio of step times, whatever the peak.

A peak is dense, without sparsity, and says where it comes from. A device that the table doesn't know has none, and its
MFU prints as n/a; nothing is guessed.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

NOT_AVAILABLE = "n/a"
DISAGREEMENT = 0.02  # above this, formula and counter are both reported

PeakSource = Literal["datasheet", "measured-gemm", "user"]


# FLOPs of a model


def palm_flops_per_token(n: int, layers: int, heads: int, head_dim: int, sequence: int) -> int:
    """Return the FLOPs of forward and backward for one token of a transformer: 6N + 12LHQT (PaLM, appendix B).

    `n` counts the parameters that are multiplied: without position embeddings and, if it is not tied to the head,
    without the token embedding, which are only looked up. Attention counts in full: its causal half is not taken off,
    as in PaLM and nanoGPT, while some tools halve it.
    """
    return 6 * n + 12 * layers * heads * head_dim * sequence


def count_flops(model: nn.Module, *inputs: Tensor) -> int:
    """Count the FLOPs of one forward and backward by torch's FlopCounterMode: matrix products, convolutions, attention.

    `model` is the bare module, whose forward returns the loss, alone or last in a tuple. Counting goes by shapes, on
    the meta device: nothing is computed or changed, and all of attention is seen, where the counter misses the CPU's
    fused kernel.
    """
    state = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    with FlopCounterMode(display=False) as counter:
        output = functional_call(model, state, tuple(tensor.to("meta") for tensor in inputs))
        loss = output[-1] if isinstance(output, tuple) else output
        torch.autograd.grad(
            loss.sum(), [tensor for tensor in state.values() if tensor.requires_grad], allow_unused=True
        )
    return int(counter.get_total_flops())


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of one rank's forward and backward over one batch: counted and, for a transformer, by formula."""

    counted: int
    formula: int | None = None

    @property
    def per_batch(self) -> int:
        """The figure that MFU is computed from: the formula's where there is one."""
        return self.counted if self.formula is None else self.formula

    @property
    def convention(self) -> str:
        """Which figure it is, and both where they disagree by more than 2 %."""
        if self.formula is None:
            return "matrix products and convolutions counted by FlopCounterMode"
        rule = "PaLM 6N + 12LHQT, causal attention in full"
        if abs(self.formula - self.counted) <= DISAGREEMENT * self.counted:
            return rule
        difference = self.formula / self.counted - 1 if self.counted else float("inf")
        return f"{rule}: {self.formula / 1e9:.3f} GFLOP; counted {self.counted / 1e9:.3f} GFLOP ({difference:+.1%})"


# Peak FLOP/s of a device


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense peak FLOP/s, of one device or of all ranks together, and where the figure comes from."""

    flops: float
    source: PeakSource

    @property
    def label(self) -> str:
        """What to call an MFU over this peak."""
        return "MFU vs measured GEMM peak" if self.source == "measured-gemm" else f"MFU ({self.source} peak)"


_Precision = Literal["fp16", "bf16", "tf32", "fp32"]
_HALF = ("fp16", "bf16")


def _tera(half: float, tf32: float | None, fp32: float | None, kinds: tuple[str, ...] = _HALF) -> dict[str, float]:
    """Peaks of a GPU in units of 10^12 FLOP/s; `half` holds for the `kinds` of 16-bit numbers, accumulated in fp32."""
    given = {**dict.fromkeys(kinds, half), "tf32": tf32, "fp32": fp32}
    return {precision: peak for precision, peak in given.items() if peak is not None}


# Note: GPU names. A name is matched whole, as torch.cuda.get_device_name gives it, less the maker's words in front. So
# an L40S is not taken for an L4, an H100 NVL not for an SXM, a laptop part, a "Ti", a "D" or a MIG slice not for the
# whole desktop or server chip: each of these has another peak, and without an entry of its own none here.
_MAKER = re.compile(r"^(?:NVIDIA |AMD |Tesla |GeForce |Instinct )+", re.IGNORECASE)
# Sources: vendors' data sheets and architecture white papers; where they print sparse figures, half of those. The RTX
# cards' 16-bit figures are those with fp32 accumulation. Where no figure is certain, there is none.
_GPUS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"V100-SXM[23]-\d+GB(-LS)?", _tera(125, None, 15.7, ("fp16",))),
    (r"T4", _tera(65, None, 8.1, ("fp16",))),
    (r"A100(-SXM4-\d+GB|-PCIE-\d+GB| \d+GB PCIe)", _tera(312, 156, 19.5)),
    (r"A30", _tera(165, 82, 10.3)),
    (r"A40", _tera(149.7, 74.8, 37.4)),
    (r"A10", _tera(125, 62.5, 31.2)),
    (r"RTX A6000", _tera(154.85, 77.4, 38.7)),
    (r"H100( \d+GB HBM3|-SXM5?-\d+GB| SXM5?)", _tera(989.4, 494.7, 66.9)),
    (r"H100 PCIe", _tera(756, 378, 51.2)),
    (r"H100 NVL", _tera(835, 417, 60)),
    (r"H200( SXM)?", _tera(989.4, 494.7, 66.9)),
    (r"H200 NVL", _tera(836, 418, 60)),
    (r"B200", _tera(2250, None, None)),
    (r"GB200", _tera(2500, None, None)),
    (r"L4", _tera(121, 60, 30.3)),
    (r"L40S", _tera(362, 183, 91.6)),
    (r"RTX 3090", _tera(71, 35.6, 35.6)),
    (r"RTX 4090", _tera(165.2, 82.6, 82.6)),
    (r"RTX 5090", _tera(209.5, 104.8, 104.8)),
    (r"MI250X", _tera(191.5, None, None)),  # one of the package's two dies, which is what torch calls a device
    (r"MI300X", _tera(1307, None, None)),
    (r"MI355X", _tera(2500, None, None)),
)


def gpu_peak(name: str, dtype: torch.dtype, *, tf32: bool = False) -> Peak | None:
    """Return a GPU's dense peak by its name, or None if it is not known.

    `tf32` says that fp32 matrix products may run as TF32 (`torch.backends.cuda.matmul.allow_tf32`).
    """
    precision: _Precision
    if dtype == torch.float32:
        precision = "tf32" if tf32 else "fp32"
    elif dtype in (torch.float16, torch.bfloat16):
        precision = "fp16" if dtype == torch.float16 else "bf16"
    else:
        return None
    bare = _MAKER.sub("", name.strip())
    for pattern, peaks in _GPUS:
        if re.fullmatch(pattern, bare, re.IGNORECASE):
            return Peak(float(round(peaks[precision] * 1e12)), "datasheet") if precision in peaks else None
    return None


def measure_gemm_peak(
    dtype: torch.dtype = torch.float32,
    *,
    seconds: float = 1.0,
    sizes: tuple[int, ...] = (512, 1024, 2048),
    barrier: Callable[[], object] = lambda: None,
    sum_over_ranks: Callable[[float], float] = lambda value: value,
) -> Peak:
    """Measure what square matrix products reach on this CPU with all ranks at once, summed over the ranks.

    Called on every rank. Each size gets its share of `seconds` behind a barrier of its own, and a rank's peak is the
    best single product of any size: an upper bound, so that the MFU over it errs low. Other tenants change it from
    minute to minute (on one virtual machine from 104 to 23 GFLOP/s a core), so measure before and after the run and
    keep the higher with `higher_peak`.
    """
    if seconds <= 0:
        raise ValueError(f"measuring takes a positive time, not {seconds} s")
    best, share = 0.0, seconds / len(sizes)
    for size in sizes:
        fits = best == 0 or 2 * size**3 < best * share  # without bf16 in hardware, 2048 takes a minute
        if fits:
            a, b, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
            torch.mm(a, b, out=out)  # the first product also sets up the library's threads and buffers
        barrier()
        start = time.perf_counter()
        end = start + share if fits else start
        while start < end:
            torch.mm(a, b, out=out)
            done = time.perf_counter()
            if done <= end or best == 0:  # a product that overran may have had the machine to itself
                best = max(best, 2 * size**3 / (done - start))
            start = done
    return Peak(sum_over_ranks(best), "measured-gemm")


def job_peak(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tf32: bool = False,
    device_tflops: float | None = None,
    seconds: float = 1.0,
    barrier: Callable[[], object] = lambda: None,
    sum_over_ranks: Callable[[float], float] = lambda value: value,
) -> Peak | None:
    """Return the peak of all ranks' devices together: the user's figure, a GPU's from the table, a CPU's as measured.

    Called on every rank. None on every rank if any rank's GPU is not known.
    """
    if device_tflops is None and device.type == "cpu":
        return measure_gemm_peak(dtype, seconds=seconds, barrier=barrier, sum_over_ranks=sum_over_ranks)
    if device_tflops is not None:
        own: Peak | None = Peak(device_tflops * 1e12, "user")
    else:
        own = gpu_peak(torch.cuda.get_device_name(device), dtype, tf32=tf32) if device.type == "cuda" else None
    total = sum_over_ranks(math.nan if own is None else own.flops)  # NaN from one rank is NaN for all
    return None if own is None or math.isnan(total) else Peak(total, own.source)


def higher_peak(before: Peak, after: Peak) -> tuple[Peak, str | None]:
    """Return the higher of two measured peaks, and a warning if they differ by more than 10 %."""
    low, high = sorted((before, after), key=lambda peak: peak.flops)
    if high.flops <= 1.1 * low.flops:
        return high, None
    return high, (
        f"the measured GEMM peak went from {before.flops / 1e9:.0f} to {after.flops / 1e9:.0f} GFLOP/s during the run; "
        "the machine was not quiet, so compare MFUs only within this run"
    )


# Utilisation


def mfu(flops: float, seconds: float, peak: Peak | None) -> float | None:
    """Return the share of the peak that `flops` in `seconds` are; None without a peak. All three for the same ranks."""
    return None if peak is None or seconds <= 0 else flops / (seconds * peak.flops)


def format_mfu(value: float | None) -> str:
    """Write an MFU as a percentage, or n/a; more than the peak is marked, since then the peak is wrong."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:.1%}" + (" (!)" if value > 1 else "")
