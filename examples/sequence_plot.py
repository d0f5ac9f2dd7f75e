"""A picture of recall@10 as runs of the sequence example go on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sequence_training import Score


def write_sequence_plot(path: Path, title: str, results: dict[str, list[Score]]) -> None:
    """Writes the picture: a curve for each run, of its first seed.

    Args:
        path: its suffix tells the format.
        title: above the picture.
        results: by the title of a run, its seeds.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Equal results give equal files.
    with rc_context({"svg.hashsalt": "torchrec_hkv"}):
        figure = Figure(figsize=(6, 2.8), layout="constrained")
        figure.suptitle(title, fontsize=10)
        axes = figure.subplots()
        for number, (name, scores) in enumerate(results.items()):
            steps = [step for step, _ in scores[0].progress]
            recalls = [recall for _, recall in scores[0].progress]
            # Curves that lie on each other: the later one is dashed.
            axes.plot(steps, recalls, "--" if number % 2 else "-", linewidth=1.3, label=name)
        axes.set_xlabel("steps", fontsize=8)
        axes.set_ylabel("recall@10", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        axes.tick_params(labelsize=8)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
