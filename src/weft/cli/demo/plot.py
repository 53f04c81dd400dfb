"""The losses of the demo as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from weft.cli.demo.train import Run

__all__ = ["plot_losses"]


def plot_losses(path: Path, ranks: Sequence[float], single: Sequence[float], run: Run) -> None:
    """Write the loss of every step, and below it how far the two runs are apart, as PNG.

    Args:
        path: the file to write.
        ranks: losses over the ranks.
        single: losses of one process; none when there was no such run.
        run: what was trained.
    """
    figure = Figure(figsize=(8, 5.5 if single else 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if single else 1, 1, sharex=True, squeeze=False,
                           height_ratios=[3, 1] if single else [1])[:, 0]
    steps = range(len(ranks))
    if single:
        axes[0].plot(steps, single, color="0.75", linewidth=5, label="one process, plain torch")
    axes[0].plot(steps, ranks, color="tab:blue", linewidth=1.5, label="four ranks, dp=2 x tp=2")
    axes[0].set_ylabel("cross-entropy per byte (nats)")
    axes[0].set_title(f"{run.settings.num_blocks} blocks of width {run.settings.width} on Python's "
                      "standard library", loc="left", fontsize=10)
    axes[0].legend(frameon=False)
    if single:
        apart = [abs(one - other) / other for one, other in zip(ranks, single)]
        # Steps that agree to the last bit stand on the lower edge of a logarithmic scale.
        axes[1].semilogy(steps, [max(each, 1e-9) for each in apart], ".", color="tab:red")
        axes[1].set_ylim(5e-10, 1e-3)
        axes[1].axhline(1e-4, color="0.5", linewidth=0.8, linestyle="--")
        axes[1].set_ylabel("relative\ndifference")
    axes[-1].set_xlabel("step")
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
