"""Trains a small SASRec to predict the next item; item ids need not be known in advance.

    torchrun --nproc_per_node 2 examples/train_sequence.py
    python examples/train_sequence.py --data movietweetings.dat --order time

Two runs have the same model, seed, batches and initial rows. One has a stock table of all items,
which must be known in advance. The other has a hash table, which creates rows as items arrive.

--order known trains on all histories without each user's last item, and then predicts that item.
--order time makes one pass in order of time: it predicts each choice from the user's last choices,
and then trains on it. A choice of an item that nobody chose before counts as missed.

Predictions rank all known items that the user has not chosen yet. recall@10 is the share of
predictions with the right item among the first ten. NDCG@10 weights these by the item's rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys

import numpy as np
import torch.distributed as dist
from launch import MOVIELENS, load, make_parser, positive, processes, run, share
from plot import Curves, add_plot, check_plot, write_panels
from saves import add_saves, check_saves
from sequence_data import Events, last_events
from sequence_training import (
    RUNS,
    Score,
    Settings,
    check_epochs,
    check_time,
    pass_over_time,
    train_epochs,
)

COLUMNS = ("run", "recall@10", "NDCG@10", "items held")


def table(results: dict[str, list[Score]]) -> list[tuple[str, ...]]:
    """Formats means over seeds, with standard deviations if there are several seeds."""
    lines = [COLUMNS]
    for key, scores in results.items():
        num_items = ", ".join(sorted({f"{score.items:,}" for score in scores}))
        lines.append(
            (
                RUNS[key],
                _mean([s.recall for s in scores]),
                _mean([s.ndcg for s in scores]),
                num_items,
            )
        )
    return lines


def _mean(values: list[float]) -> str:
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.4f}"


def differences(results: dict[str, list[Score]]) -> str | None:
    """Formats the hash table's figures minus the stock table's, for the same seeds."""
    if not {"stock", "hkv"} <= set(results):
        return None
    pairs = list(zip(results["hkv"], results["stock"], strict=True))
    recall = _signed([score.recall - stock.recall for score, stock in pairs])
    ndcg = _signed([score.ndcg - stock.ndcg for score, stock in pairs])
    return f"hkv - stock: recall@10 {recall}, NDCG@10 {ndcg}"


def _signed(values: list[float]) -> str:
    mean = f"{np.mean(values):+.4f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.4f}"


def main() -> None:
    """Parses arguments, trains, prints.

    Raises:
        DataError: the input is invalid.
    """
    arguments = parse()
    check_plot(arguments.plot)
    check_saves(arguments)
    log = load(arguments)
    events = Events.of(log)
    if arguments.order == "known":
        check_epochs(events, arguments.length, arguments.batch_size)
    else:
        check_time(events, arguments.batch_size)
    with processes(arguments.device) as device:
        speaks = dist.get_rank() == 0
        if speaks:
            tested = len(last_events(events)) if arguments.order == "known" else len(events)
            print(
                f"{log.name}: {len(events):,} choices of {len(events.start) - 1:,} users among "
                f"{len(np.unique(events.items)):,} items, {tested:,} to predict"
            )
        results: dict[str, list[Score]] = {key: [] for key in arguments.runs}
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            settings = Settings(
                batch_size=arguments.batch_size,
                length=arguments.length,
                epochs=arguments.epochs,
                candidates=arguments.candidates,
                rows=arguments.rows,
                seed=seed,
                device=device,
                tensorboard=arguments.tensorboard,
                save=arguments.save,
                resume=arguments.resume,
            )
            learn = train_epochs if arguments.order == "known" else pass_over_time
            for key in arguments.runs:
                results[key].append(learn(events, key, settings))
        if speaks:
            for line in table(results):
                print(f"{line[0]:24}" + "".join(f"{cell:>18}" for cell in line[1:]))
            if (difference := differences(results)) is not None:
                print(difference)
            write(arguments, log.name, results)


def parse() -> argparse.Namespace:
    """Parses the arguments."""
    parser = make_parser(__doc__, MOVIELENS)
    parser.set_defaults(batch_size=64)
    parser.add_argument(
        "--order",
        choices=["known", "time"],
        default="known",
        help="passes over known histories, or one pass in time order (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=list(RUNS),
        default=list(RUNS),
        metavar="RUN",
        help=f"which runs to make, of {', '.join(RUNS)} (default: all)",
    )
    parser.add_argument(
        "--epochs", type=positive, default=40, help="with --order known (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=positive, default=50, help="items of a history (default: %(default)s)"
    )
    parser.add_argument(
        "--candidates",
        type=positive,
        default=8,
        help="sampled items for each history; a process shares its samples (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=share,
        metavar="SHARE",
        help="rows of the hash table for each item of the log (default: two)",
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        default=1,
        help="number of seeds, from --seed on (default: %(default)s)",
    )
    add_plot(parser, "recall@10 as it goes")
    add_saves(parser, "after each epoch, or each twentieth of the pass in time order")
    return parser.parse_args()


def write(arguments: argparse.Namespace, name: str, results: dict[str, list[Score]]) -> None:
    """Writes the requested files."""
    if arguments.json:
        content = {
            "data": name,
            "order": arguments.order,
            "runs": {
                key: [dataclasses.asdict(score) for score in scores]
                for key, scores in results.items()
            },
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
        print(f"Written: {arguments.json}")
    if arguments.plot:
        title = f"{name}, order {arguments.order}"
        curves = {RUNS[key]: scores[0].progress for key, scores in results.items()}
        write_panels(arguments.plot, title, [Curves("steps", "recall@10", curves, legend=True)])


if __name__ == "__main__":
    sys.exit(run(main))
