"""Quality of Tensor-Train tables against their size: a click model on MovieTweetings.

    python -m benchmarks.tensor_train_quality --data movietweetings_100k.dat \\
        --out benchmarks/results/tensor_train_quality.csv \\
        --plot docs/performance/tensor_train_quality.svg

A DLRM (dim 16, dense 32-16, over 64-32-1) uses the columns user, movie and hour of day; a rating of
8 or more is a click. The first 80 % of the rows in time are for training, the others are the test.
Users and movies are in stock `fused` tables (row-wise Adagrad), or on the backend `tt` (Adam) with
several ratios of bytes. An order of all ids is part of the vocabulary and is not counted. Learning
rate, number of cores and epochs are chosen on the last fifth of the training rows, with other
seeds; the test is used once. Reported is the test AUC as a mean over seeds, with a 95 % interval
bootstrapped by user.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.arguments import AtLeast
from benchmarks.environment import CsvFile
from benchmarks.quality_data import Ratings, bootstrap, read_ratings
from benchmarks.quality_model import Choice, Variant, bytes_of, train
from benchmarks.quality_plot import plot
from benchmarks.ranks import joined_ranks

VARIANTS = (
    Variant("plain"),
    Variant("frequent ids first, 5 % of the bytes", order="frequency", order_share=0.05),
    Variant("hot rows", hot_share=0.5),
    Variant("order by frequency", order="frequency"),
    Variant(
        "order by frequency, hot movies, 5 % of the bytes",
        order="frequency",
        hot_share=0.05,
        hot_columns=("movie",),
    ),
    Variant("order by mean label", order="label"),
    Variant("order by mean label, hot rows", order="label", hot_share=0.5),
)
#: Added to seeds for the choice, so that they differ from the reported seeds.
_CHOOSING_SEED = 1000


def choices(variant: Variant | None) -> Iterator[Choice]:
    """Yields the candidates for validation: learning rates of the rows, and numbers of cores."""
    if variant is None:
        yield from (Choice(rate, 0) for rate in (0.02, 0.05, 0.1))
        return
    yield from (Choice(rate, cores) for rate in (0.005, 0.015) for cores in (2, 3))


def chosen(
    ratings: Ratings,
    variant: Variant | None,
    ratio: float,
    args: argparse.Namespace,
) -> tuple[Choice, int, float]:
    """Returns the best choice, number of epochs, and AUC on the validation part."""
    best: tuple[Choice, int, float] | None = None
    for choice in choices(variant):
        runs = [
            train(ratings, variant, ratio, choice, _CHOOSING_SEED + seed, args.epochs)
            for seed in range(args.choosing_seeds)
        ]
        for epoch in range(args.epochs):
            auc = sum(run[epoch].auc for run in runs) / len(runs)
            if best is None or auc > best[2]:
                best = (choice, epoch + 1, auc)
    assert best is not None
    return best


def measured(
    log: Ratings, variant: Variant | None, ratio: float, args: argparse.Namespace
) -> dict[str, object]:
    """Chooses on the validation part, trains with all seeds, and tests. Returns a row."""
    choice, epochs, validation = chosen(log.for_validation(), variant, ratio, args)
    runs = [
        train(log, variant, ratio, choice, seed, epochs)[-1].scores for seed in range(args.seeds)
    ]
    auc, spread, low, high = bootstrap(log, runs, args.resamples)
    size = bytes_of(log, variant, ratio, choice)
    return {
        "variant": "dense" if variant is None else variant.name,
        "wanted_ratio": ratio,
        "bytes": size,
        "ratio": round(bytes_of(log, None, 1.0, choice) / size, 2),
        "auc": round(auc, 4),
        "sd_over_seeds": round(spread, 4),
        "low_95": round(low, 4),
        "high_95": round(high, 4),
        "seeds": args.seeds,
        "cores": choice.cores or "",
        "learning_rate": choice.learning_rate,
        "epochs": epochs,
        "validation_auc": round(validation, 4),
    }


def _points(args: argparse.Namespace) -> list[tuple[Variant | None, float]]:
    variants = [variant for variant in VARIANTS if variant.name in args.variants]
    return [(None, 1.0), *itertools.product(variants, args.ratios)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="MovieTweetings' ratings.dat")
    parser.add_argument(
        "--seeds", type=AtLeast(1), default=5, help="that are reported (default: 5)"
    )
    parser.add_argument("--choosing-seeds", type=AtLeast(1), default=2, help="(default: 2)")
    parser.add_argument("--epochs", type=AtLeast(1), default=4, help="at most (default: 4)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[5.0, 20.0, 100.0])
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--limit", type=AtLeast(1), default=None, help="earliest rows to keep")
    parser.add_argument(
        "--resamples", type=AtLeast(1), default=1000, help="of users (default: 1000)"
    )
    parser.add_argument("--threads", type=AtLeast(1), default=1)
    parser.add_argument("--out", type=Path, default=None, help="CSV file to write")
    parser.add_argument("--plot", type=Path, default=None, help="SVG or PNG; takes matplotlib")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    log = read_ratings(args.data, args.limit)
    rows = []
    with joined_ranks(torch.device("cpu")), CsvFile(args.out) as file:
        for variant, ratio in _points(args):
            rows.append(measured(log, variant, ratio, args))
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            file.write(rows[-1])
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
