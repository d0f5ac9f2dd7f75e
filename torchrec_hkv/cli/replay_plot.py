"""Plots hit rates over numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchrec_hkv.replay import Replayed

_FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Checks early that the plot can be written.

    Raises:
        ValueError: matplotlib is missing, or the path is invalid.
    """
    if path.suffix not in _FORMATS or not path.absolute().parent.is_dir():
        raise ValueError(
            f"--plot is {path}, but must be a file in a folder that exists, with the ending "
            f"{', '.join(_FORMATS)}."
        )
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--plot needs the package matplotlib, which can't be imported ({error}): "
            "pip install matplotlib."
        ) from None


def write_plot(path: Path, tables: Mapping[str, Replayed], target: float | None) -> None:
    """Writes the plot: one subplot for each table, one line for each policy, with rings at knees.

    Args:
        path: path of the file; its suffix determines the format.
        tables: replayed tables by name.
        target: hit rate to mark by a line.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    across = min(3, len(tables))
    down = -(-len(tables) // across)
    # Equal results give equal files.
    with rc_context({"svg.hashsalt": "torchrec_hkv"}):
        figure = Figure(figsize=(4.6 * across, 3.4 * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False).flatten()
        for axes, table in zip(grid, tables.values(), strict=False):
            for curve in table.curves:
                rows = [point.rows for point in curve.points]
                rates = [point.hit_rate for point in curve.points]
                errors = [point.error for point in curve.points]
                shown = errors if any(errors) else None
                line = axes.errorbar(
                    rows, rates, yerr=shown, marker=".", capsize=2, label=str(curve.policy)
                )
                color = line.lines[0].get_color()
                knee = curve.knee
                axes.plot(knee.rows, knee.hit_rate, "o", color=color, ms=10, mfc="none")
            unlimited = table.unlimited_hit_rate
            axes.axhline(unlimited, color="black", linewidth=0.8, label="a row for each id")
            if target is not None:
                axes.axhline(target, color="gray", linestyle=":", label="target")
            axes.set(xscale="log", xlabel="rows", ylabel="hit rate", title=table.name)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
        for axes in grid[len(tables) :]:
            axes.set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
