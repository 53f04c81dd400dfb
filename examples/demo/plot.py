"""The losses of the demo as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from demo.train import TOLERANCE, Run, Step, differences
from weft.cli.canvas import new_figure

__all__ = ["plot_losses"]


def plot_losses(path: Path, run: Run, ranks: Sequence[Step], single: Sequence[Step]) -> None:
    """Write the loss of every step, and below it how far the two runs are apart, as PNG.

    Args:
        path: the file to write.
        run: what was trained.
        ranks: the steps over the ranks.
        single: those of one process; none when there was no such run.
    """
    figure = new_figure(8, 5.5 if single else 4, path, layout="constrained")
    axes = figure.subplots(2 if single else 1, 1, sharex=True, squeeze=False,
                           height_ratios=[3, 1] if single else [1])[:, 0]
    steps = range(len(ranks))
    if single:
        axes[0].plot(steps, [step.loss for step in single], color="0.75", linewidth=5,
                     label="one process, plain torch")
    axes[0].plot(steps, [step.loss for step in ranks], color="tab:blue", linewidth=1.5,
                 label="four ranks, dp=2 x tp=2")
    axes[0].set_ylabel("cross-entropy per byte (nats)")
    axes[0].set_title(f"{run.settings.num_blocks} blocks of width {run.settings.width} on Python's "
                      "standard library", loc="left", fontsize=10)
    axes[0].legend(frameon=False)
    if single:
        # A logarithmic scale has no zero: what agrees to the last bit stands at its lower edge,
        # and what is no number at the upper one.
        apart = [min(max(each, 1e-9), 1.0) for each in differences(ranks, single)]
        axes[1].semilogy(steps, apart, ".", color="tab:red")
        axes[1].set_ylim(3e-10, max(1e-3, 3 * max(apart)))
        axes[1].set_yticks([1e-9, 1e-7, 1e-5, 1e-3], ["0", "1e-7", "1e-5", "1e-3"])
        axes[1].axhline(TOLERANCE, color="0.5", linewidth=0.8, linestyle="--")
        axes[1].set_ylabel("relative\ndifference")
    axes[-1].set_xlabel("step")
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
