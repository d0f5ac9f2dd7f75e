"""The README's plot: step times relative to static tables, and AUC with fewer rows.

python -m benchmarks overview_plot docs/performance/overview.svg
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ("S1", "S2", "S2 hot", "S3", "S4")
STREAM = "MovieTweetings"
#: Bars of the right half, sorted by AUC: method of ``quality.csv`` and label.
METHODS = {
    "unlimited": "a row for each id",
    "hkv, adaptive": "hkv, adaptive",
    "hkv, lfu": "hkv, LFU",
    "MCH, DistanceLFU": "TorchRec MCH, DistanceLFU",
    "MCH, LFU": "TorchRec MCH, LFU",
    "hkv, lru": "hkv, LRU",
    "MCH, LRU": "TorchRec MCH, LRU",
    "hashed": "ids modulo the rows",
}


def read(name: str) -> list[dict[str, str]]:
    """Reads the rows of a results file."""
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def plot(path: Path) -> None:
    """Writes the plot.

    Args:
        path: output file; its suffix is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps = {
        row["workload"]: row
        for row in read("training_step.csv")
        if row["optimizer"] == "rowwise_adagrad"
    }
    aucs = {
        row["method"]: float(row["auc"])
        for row in read("quality.csv")
        if row["stream"] == STREAM and row["share"] == "0.25"
    }
    # Equal results give equal files.
    with rc_context({"svg.hashsalt": "overview", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8.4, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        places = range(len(WORKLOADS))
        for shift, side, label, colour in (
            (-0.2, "fbgemm_ms", "FBGEMM, static tables", "#b0b0b0"),
            (0.2, "hkv_ms", "hkv, hash tables", "#3b78b0"),
        ):
            heights = [float(steps[name][side]) for name in WORKLOADS]
            left.bar([at + shift for at in places], heights, 0.4, label=label, color=colour)
        left.set_xticks(places, WORKLOADS)
        left.set_ylabel("ms")
        left.set_title(f"a training step, {steps['S1']['device']}", fontsize=9)
        left.legend(fontsize=8)
        names = list(METHODS)[::-1]
        colours = ["#3b78b0" if name.startswith("hkv") else "#b0b0b0" for name in names]
        right.barh([METHODS[name] for name in names], [aucs[name] for name in names], color=colours)
        right.set_xlim(0.70, 0.78)
        right.set_title(f"AUC, rows for 25 % of the ids, {STREAM}", fontsize=9)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Parses the command line and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="path of the picture")
    plot(parser.parse_args().picture)


if __name__ == "__main__":
    main()
