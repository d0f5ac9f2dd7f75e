"""Trains one model on one click log: the main function of train_dlrm.py and train_deepfm.py."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from click_model import SLACK, Variant
from click_training import TRAIN_SHARE, Settings, run
from launch import MOVIELENS, count_processes, load, make_parser, positive, processes
from plot import add_plot, check_plot, write_auc_plot
from report import print_judgements, print_table, write_json
from saves import add_saves, check_saves

HKV = Variant("hkv", "hash tables", "hkv", SLACK)


def main(description: str, architecture: str) -> None:
    """Parses arguments, trains, prints.

    Args:
        description: description of the example.
        architecture: ``"dlrm"`` or ``"deepfm"``.

    Raises:
        DataError: the input is invalid.
    """
    parser = make_parser(description, None if architecture == "dlrm" else MOVIELENS)
    parser.add_argument("--epochs", type=positive, default=1, help="(default: %(default)s)")
    parser.add_argument(
        "--rows",
        type=float,
        default=SLACK,
        metavar="SHARE",
        help="rows of a hash table for each id of its column; less than 1 evicts (default:"
        " %(default)s)",
    )
    parser.add_argument(
        "--evaluate-every",
        type=positive,
        metavar="STEPS",
        help="evaluate on the test after every so many steps and the last, by TorchRec's metrics",
    )
    add_plot(parser, "train and test AUC")
    add_saves(parser)
    arguments = parser.parse_args()
    if not 0 < arguments.rows <= 100:
        parser.error(f"argument --rows: {arguments.rows} is not above 0 and at most 100")
    check_plot(arguments.plot)
    check_saves(arguments)
    log = load(arguments, TRAIN_SHARE)
    split = int(len(log) * TRAIN_SHARE)
    with processes(arguments.device) as device:
        evaluate_every = arguments.evaluate_every
        settings = Settings.of(
            arguments, device, architecture=architecture, evaluate_every=evaluate_every
        )
        speaks = dist.get_rank() == 0
        if speaks:
            print(
                f"{log.name}: {split:,} rows to train on, {len(log) - split:,} to test on\n"
                f"{count_processes()} on {device.type}"
            )
        result = run(log, split, dataclasses.replace(HKV, rows=arguments.rows), settings)
        if speaks:
            print_judgements(result.judgements)
            title = f"{log.name}, {architecture}, seed {settings.seed}"
            print_table(title, [result])
            print(f"test AUC {result.auc:.4f}, {result.samples_per_second:,.0f} samples/s")
            if arguments.json:
                write_json(arguments.json, log, split, settings, [result])
                print(f"Written: {arguments.json}")
            if arguments.plot:
                write_auc_plot(arguments.plot, title, [result])
