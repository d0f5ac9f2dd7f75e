"""A picture of what the runs of an example gave: AUC while they train, and on the test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from click_data import DataError
from launch import check_json

if TYPE_CHECKING:
    from click_training import Result

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises DataError where matplotlib is missing, or the picture can't be written."""
    if path.suffix not in FORMATS:
        raise DataError(f"--plot is {path}, but must end with {', '.join(FORMATS)}.")
    check_json(path, "--plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"--plot needs the package matplotlib, which can't be imported ({error}): "
            "pip install matplotlib."
        ) from None


def write_plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """Writes the picture: curves of the train AUC, and a bar for each run's test AUC.

    Args:
        path: its suffix tells the format.
        title: above the picture.
        results: of the runs.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Equal results give equal files.
    with rc_context({"svg.hashsalt": "torchrec_hkv"}):
        figure = Figure(figsize=(8, 2.6), layout="constrained")
        figure.suptitle(title, fontsize=10)
        curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
        for number, result in enumerate(results):
            # Runs with equal rows have equal curves; the later one is dashed.
            style = "--" if number % 2 else "-"
            steps, aucs = [p.step for p in result.progress], [p.auc for p in result.progress]
            (line,) = curves.plot(steps, aucs, style, linewidth=1.3, label=result.variant.title)
            bars.barh(number, result.auc, color=line.get_color(), height=0.7)
            bars.text(result.auc, number, f" {result.auc:.4f}", va="center", fontsize=8)
        curves.set_xlabel("steps", fontsize=8)
        curves.set_ylabel("train AUC, last batches", fontsize=8)
        curves.grid(alpha=0.3)
        aucs = [result.auc for result in results]
        bars.set_xlim(min([0.5, *aucs]), max(aucs) + 0.08)
        bars.set_xlabel("test AUC", fontsize=8)
        bars.set_yticks(range(len(results)), [r.variant.title for r in results], fontsize=8)
        bars.invert_yaxis()
        for axes in (curves, bars):
            axes.tick_params(labelsize=8)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
