"""Trains a click model on MovieLens-100K with hash tables, and compares it with stock tables.

    torchrun --nproc_per_node 2 examples/train_movielens.py

Four runs have the same model, seed and batches: stock tables with all ids known in advance; hash
tables with room for all ids, from the same initial rows; hash tables with room for a quarter of
the ids; stock tables with a quarter of the rows and hashed ids. Each is trained on the first 80 %
of the rows in time, and tested on the last 20 %. Without torchrun, it runs in one process.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from click_model import VARIANTS
from click_training import TRAIN_SHARE, Settings, run
from launch import MOVIELENS, count_processes, load, make_parser, positive, processes
from launch import run as launch
from plot import add_plot, check_plot, write_auc_plot
from report import print_comparison, print_table, write_json
from saves import add_saves, check_saves


def main() -> None:
    """Parses arguments, trains, prints.

    Raises:
        DataError: the input is invalid.
    """
    parser = make_parser(__doc__, MOVIELENS)
    keys = [variant.key for variant in VARIANTS]
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=keys,
        default=keys,
        metavar="RUN",
        help=f"which runs to make, of {', '.join(keys)} (default: all)",
    )
    parser.add_argument("--epochs", type=positive, default=2, help="(default: %(default)s)")
    add_plot(parser, "train and test AUC of the runs")
    add_saves(parser)
    arguments = parser.parse_args()
    check_plot(arguments.plot)
    check_saves(arguments)
    log = load(arguments, TRAIN_SHARE)
    split = int(len(log) * TRAIN_SHARE)
    with processes(arguments.device) as device:
        settings = Settings.of(arguments, device)
        speaks = dist.get_rank() == 0
        if speaks:
            print(
                f"{log.name}: {split:,} rows to train on, {len(log) - split:,} later ones to test"
                f" on\n{count_processes()} on {device.type}"
            )
        results = [
            run(log, split, variant, settings)
            for variant in VARIANTS
            if variant.key in arguments.runs
        ]
        if speaks:
            epochs = "1 epoch" if settings.epochs == 1 else f"{settings.epochs} epochs"
            title = f"{log.name}, {epochs}, seed {settings.seed}"
            print_table(title, results)
            print_comparison(results)
            if arguments.json:
                write_json(arguments.json, log, split, settings, results)
                print(f"Written: {arguments.json}")
            if arguments.plot:
                write_auc_plot(arguments.plot, title, results)


if __name__ == "__main__":
    sys.exit(launch(main))
