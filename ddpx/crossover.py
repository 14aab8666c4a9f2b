"""A picture of what each algorithm should cost, by size: where the lines cross, another one becomes the best."""

from collections.abc import Sequence
from pathlib import Path

from ddpx.cost import Fabric, best_by_size, predict
from ddpx.units import bytes_text

DASHES = ["-", (0, (6, 4)), (0, (1, 1.5))]
SIZES = [2.0**power for power in range(10, 35)]  # 1 KiB to 16 GiB


def draw(path: Path, collective: str, names: Sequence[str], ranks: int, fabric: Fabric, title: str) -> None:
    """Predicted time against size, both logarithmic, of the algorithms called `names`; written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axis = pyplot.subplots(figsize=(9, 5.5))
    for index, name in enumerate(names):
        times = [predict(collective, name, ranks, size, fabric).total_s for size in SIZES]
        axis.plot(SIZES, times, label=name, lw=1.8, ls=DASHES[index % len(DASHES)])  # some lie on each other
    best = [(max(size, SIZES[0]), name) for size, name in best_by_size(ranks, fabric, list(names), collective)]
    for size, name in best:
        if size <= SIZES[-1]:
            axis.axvline(size, color="grey", lw=0.7, ls="--")
            where = axis.get_xaxis_transform()
            text = f"{name} is the fastest" + (f"\nfrom {bytes_text(size)} on" if size > SIZES[0] else "")
            axis.text(size * 1.15, 0.98, text, fontsize=8.5, va="top", transform=where)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e3:g}"))
    axis.set_xlabel("buffer of a rank")
    axis.set_ylabel("milliseconds, by formula")
    axis.set_title(title, fontsize=11)
    axis.grid(True, which="major", lw=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
