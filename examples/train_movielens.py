"""Trains a click model on MovieLens-100K with hash tables, and compares it with stock tables.

    torchrun --nproc_per_node 2 examples/train_movielens.py

Four runs of the same model, seed and batches: stock tables with every id known in advance; hash
tables with room for all ids, from the same initial rows; hash tables with room for a quarter of
them; stock tables of a quarter of the rows with hashed ids. The first 80 % of the rows in time are
trained on, the last 20 % are the test. It runs in one process without torchrun, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from click_data import ClickLog, DataError, read
from click_model import VARIANTS
from click_training import Settings, run
from report import print_comparison, print_table, write_json

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DATA = ROOT / ".data" / "recbole-1.2.1-py3-none-any.whl"
TRAIN_SHARE = 0.8


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DEFAULT_DATA,
        metavar="FILE",
        help="MovieLens-100K (.inter, or the recbole wheel), MovieTweetings (.dat) or Criteo (.npz)"
        " (default: the wheel that 'make demo' downloads)",
    )
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
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=256,
        help="rows a step, over all processes (default: %(default)s)",
    )
    parser.add_argument("--limit", type=positive, help="use the earliest rows only, so many")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default here: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> ClickLog:
    """Reads the data, and checks what argparse does not.

    Raises:
        DataError: something is wrong, in one sentence.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and here > gpus:
        raise DataError(f"As many GPUs as processes ({here}) are needed, and there are {gpus}.")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise DataError(f"There is no folder {arguments.json.absolute().parent}.")
    log = read(arguments.data)
    if arguments.limit:
        log = log.first(arguments.limit)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.batch_size % processes:
        raise DataError(f"The batch size must be a multiple of the {processes} processes.")
    if arguments.batch_size > int(len(log) * TRAIN_SHARE):
        raise DataError(
            f"A batch of {arguments.batch_size} rows is more than the"
            f" {int(len(log) * TRAIN_SHARE)} rows to train on."
        )
    return log


def join_processes(device: str) -> torch.device:
    """Joins the processes that torchrun started, or makes a group of one."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device(device, torch.cuda.current_device() if device == "cuda" else None)


def silence_advice() -> None:
    """Leaves out what TorchRec and PyTorch advise their own developers."""
    warnings.simplefilter("ignore", FutureWarning)
    for name in ("torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> int:
    arguments = parse_arguments()
    silence_advice()
    try:
        log = load(arguments)
    except DataError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        else:
            # All ranks fail alike; the first to exit makes torchrun end the others, and rank 0
            # must have spoken by then.
            time.sleep(5)
        return 2

    settings = Settings(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        device=join_processes(arguments.device),
    )
    split = int(len(log) * TRAIN_SHARE)
    speaks = dist.get_rank() == 0
    if speaks:
        print(
            f"{log.name}: {split:,} rows to train on, {len(log) - split:,} later ones to test on;"
            f" {dist.get_world_size()} processes on {settings.device.type}"
        )
    results = [
        run(log, split, variant, settings) for variant in VARIANTS if variant.key in arguments.runs
    ]
    if speaks:
        print_table(f"{log.name}, {settings.epochs} epochs, seed {settings.seed}", results)
        print_comparison(results)
        if arguments.json:
            write_json(arguments.json, log, split, settings, results)
            print(f"Written: {arguments.json}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
