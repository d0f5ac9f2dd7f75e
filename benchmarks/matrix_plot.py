"""Heat maps of the matrix: time of a step divided by that of FBGEMM's static tables.

python -m benchmarks matrix_plot benchmarks/results/matrix.csv docs/performance/matrix.svg
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

#: For each map: section, names of the rows' and the columns' axes, and title.
_MAPS = (
    ("dim", "dims", "skew", "row-wise Adagrad, fp32: tables x columns by skew"),
    ("dim_adam", "dims", "skew", "Adam, fp32"),
    ("lfu", "dims", "skew", "row-wise Adagrad, fp32, evicted by LFU"),
    ("dtype", "dims", "dtype", "16-bit rows"),
    ("policy", "policy", "skew", "eviction policy, 26 x 128 columns"),
    ("optimizer", "dims", "optimizer", "optimizer, power law 1.05"),
)


def plot(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Writes the heat maps of the sections that the rows have.

    Args:
        rows: rows of the matrix.
        path: output file; its suffix is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no row has a ratio and a section that is drawn.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "matrix"  # equal rows give equal files
    from matplotlib import colors, pyplot

    maps = [a_map for a_map in _MAPS if _cells(rows, *a_map[:3])[0]]
    if not maps:
        raise ValueError(
            "No row has a ratio to draw: measure one of the sections "
            f"{[a_map[0] for a_map in _MAPS]}, with FBGEMM's tables."
        )
    heights = [len(_cells(rows, *a_map[:3])[0]) + 2.5 for a_map in maps]
    figure, axes = pyplot.subplots(
        len(maps),
        1,
        figsize=(7, 0.28 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    # White is as fast as static tables, blue is faster, red is slower.
    norm = colors.TwoSlopeNorm(vcenter=1.0, vmin=0.2, vmax=2.0)
    for ax, (section, down, across, title) in zip(axes[:, 0], maps, strict=True):
        names, columns, values = _cells(rows, section, down, across)
        shown = [[values.get((name, column), float("nan")) for column in columns] for name in names]
        ax.imshow(shown, aspect="auto", cmap="RdBu_r", norm=norm)
        ax.set_yticks(range(len(names)), names, fontsize=7)
        ax.set_xticks(range(len(columns)), columns, fontsize=7)
        ax.set_title(title, fontsize=8, loc="left")
        for y, name in enumerate(names):
            for x, column in enumerate(columns):
                if (name, column) in values:
                    text = f"{values[name, column]:.2f}"
                    ax.text(x, y, text, ha="center", va="center", fontsize=6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _cells(
    rows: Sequence[Mapping[str, object]], section: str, down: str, across: str
) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Returns the names of a map's rows and columns, and its values. If several cells share both
    names, takes the highest."""
    values: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["section"] != section or not row["ratio"]:
            continue
        key = str(row[down]), str(row[across])
        values[key] = max(values.get(key, 0.0), float(row["ratio"]))
    names = list(dict.fromkeys(key[0] for key in values))
    return names, list(dict.fromkeys(key[1] for key in values)), values


def main() -> None:
    """Draws the matrix of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="CSV file of the matrix")
    parser.add_argument("picture", type=Path, help="SVG or PNG to write")
    args = parser.parse_args()
    with args.rows.open(newline="") as file:
        plot(list(csv.DictReader(file)), args.picture)


if __name__ == "__main__":
    main()
