"""A plot of the quality benchmark: AUC against the ratio of bytes.

    python -m benchmarks.quality_plot benchmarks/results/tensor_train_quality.csv \\
        docs/performance/tensor_train_quality.svg
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def plot(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Writes the plot; the dense table is a line.

    Args:
        rows: rows of the benchmark.
        path: output file; its suffix is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    # Equal rows give equal files.
    matplotlib.rcParams["svg.hashsalt"] = "tensor_train_quality"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = [row for row in rows if row["variant"] == name]
        middle = [float(row["auc"]) for row in points]
        low, high = ([float(row[key]) for row in points] for key in ("low_95", "high_95"))
        if name == "dense":
            axes.axhline(middle[0], color="black", linewidth=1, label="dense")
            axes.axhspan(low[0], high[0], color="black", alpha=0.08, linewidth=0)
            continue
        errors = [
            [m - value for m, value in zip(middle, low, strict=True)],
            [value - m for m, value in zip(middle, high, strict=True)],
        ]
        ratios = [float(row["ratio"]) for row in points]
        axes.errorbar(ratios, middle, yerr=errors, marker="o", markersize=4, capsize=2, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than dense tables of users and movies")
    axes.set_ylabel("AUC on the test, 95 % interval by user")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="CSV file of benchmarks.tensor_train_quality")
    parser.add_argument("picture", type=Path, help="SVG or PNG to write")
    args = parser.parse_args(arguments)
    with args.rows.open() as file:
        rows = list(csv.DictReader(file))
    try:
        plot(rows, args.picture)
    except ImportError as error:
        parser.error(f"matplotlib can't be imported ({error}): pip install matplotlib")


if __name__ == "__main__":
    main()
