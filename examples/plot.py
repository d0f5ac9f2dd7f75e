"""``--plot``: plots of an example's figures."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click_data import DataError
from launch import check_json

if TYPE_CHECKING:
    from click_training import Result

FORMATS = (".png", ".svg", ".pdf")


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the option.

    Args:
        parser: the parser of the example.
        what: what the plot shows, for the help.
    """
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw {what}, as .png, .svg or .pdf; needs matplotlib",
    )


def check_plot(path: Path | None) -> None:
    """Checks the option before the example starts.

    Raises:
        DataError: matplotlib is missing, or the file can't be written.
    """
    if path is None:
        return
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


@dataclasses.dataclass(frozen=True)
class Curves:
    """A panel of curves.

    Attributes:
        x: label of the horizontal axis.
        y: label of the vertical axis.
        curves: coordinate pairs, by name.
        legend: whether to show the names.
    """

    x: str
    y: str
    curves: dict[str, Sequence[tuple[float, float]]]
    legend: bool = False

    def draw(self, axes: Any) -> None:
        """Draws the panel."""
        for number, (name, points) in enumerate(self.curves.items()):
            # Equal curves hide each other, so every second curve is dashed.
            style = "--" if number % 2 else "-"
            axes.plot([x for x, _ in points], [y for _, y in points], style, linewidth=1.3)
            axes.lines[-1].set_label(name)
        axes.set_xlabel(self.x, fontsize=8)
        axes.set_ylabel(self.y, fontsize=8)
        axes.grid(alpha=0.3)
        if self.legend:
            axes.legend(fontsize=8)


@dataclasses.dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars.

    Attributes:
        x: label of the horizontal axis.
        bars: lengths by name.
        first: begin of the axis, unless a bar is shorter.
    """

    x: str
    bars: dict[str, float]
    first: float = 0.0

    def draw(self, axes: Any) -> None:
        """Draws the panel. Bars have the colours of curves in the same order."""
        values = list(self.bars.values())
        for number, value in enumerate(values):
            axes.barh(number, value, color=f"C{number}", height=0.7)
            axes.text(value, number, f" {value:.4g}", va="center", fontsize=8)
        first = min([self.first, *values])
        axes.set_xlim(first, first + 1.25 * max(max(values) - first, 1e-9))
        axes.set_xlabel(self.x, fontsize=8)
        axes.set_yticks(range(len(values)), list(self.bars), fontsize=8)
        axes.invert_yaxis()


def write_panels(path: Path, title: str, panels: Sequence[Curves | Bars]) -> None:
    """Writes a plot with panels side by side. Equal figures give equal files.

    Args:
        path: the file; its suffix is the format.
        title: the title above the panels.
        panels: the panels from left to right.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "torchrec_hkv"}):
        widths = [3 if isinstance(panel, Curves) else 2 for panel in panels]
        figure = Figure(figsize=(8 if len(panels) > 1 else 6, 2.6), layout="constrained")
        figure.suptitle(title, fontsize=10)
        every_axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
        for panel, axes in zip(panels, every_axes, strict=True):
            panel.draw(axes)
            axes.tick_params(labelsize=8)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"Written: {path}")


def write_auc_plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """Plots the train AUC of runs over time, and their test AUC.

    Args:
        path: the file; its suffix is the format.
        title: the title above the plot.
        results: results of the runs.
    """
    curves = {
        result.variant.title: [(one.step, one.auc) for one in result.progress] for result in results
    }
    bars = {result.variant.title: result.auc for result in results}
    panels = [Curves("steps", "train AUC, last batches", curves), Bars("test AUC", bars, 0.5)]
    write_panels(path, title, panels)
