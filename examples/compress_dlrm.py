"""Compresses the tables of a trained DLRM into Tensor-Train tables, and trains on for some steps.

    torchrun --nproc_per_node 2 examples/compress_dlrm.py --rank 16
    python examples/compress_dlrm.py --error 0.5

First a DLRM with stock tables is trained, which know every id. Then its large tables are split into
Tensor-Train cores by TT-SVD, of a rank or to a relative error, and take the places of the dense
ones in the same model. Then the tables train on, on the same rows, at a low rate, so that their
cores adapt to what was cut away; the rest of the model stays, since it would only learn these rows
by heart. The first 80 % of the rows in time are trained on, the last 20 % are the test: AUC is told
of the dense model, after the compression, and after training on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys

import torch
import torch.distributed as dist
from click_batches import ClickBatches
from click_data import ClickLog, DataError
from click_model import Variant, build
from click_training import (
    ROW_LEARNING_RATE,
    TRAIN_SHARE,
    Reporter,
    Settings,
    test_auc,
    train,
    training_batches,
)
from launch import (
    MOVIELENS,
    load,
    make_parser,
    positive,
    processes,
    run,
    share,
    share_or_zero,
)
from tensor_train_tables import compress, move_over

from torchrec_hkv.planner.report import format_bytes

STOCK = Variant("dense", "dense tables", "fused", 1.0)
# Higher rates undo what the dense model has learned, on some data within a hundred steps.
TUNE_RATE = 0.005
COLUMNS = ["model", "table bytes", "ratio", "error", "test AUC"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is printed of one model; ``error`` is the largest of a table, relative to it."""

    model: str
    table_bytes: int
    ratio: float
    error: float | None
    auc: float

    def cells(self) -> list[str]:
        """For the printed table."""
        size = format_bytes(self.table_bytes)
        error = "" if self.error is None else f"{self.error:.3f}"
        return [self.model, size, f"{self.ratio:.1f}", error, f"{self.auc:.4f}"]


def work(
    log: ClickLog, split: int, arguments: argparse.Namespace, settings: Settings
) -> list[Stage]:
    """Trains, compresses, trains on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    test = range(split, len(log))
    batches = ClickBatches(log, STOCK, settings.device, rank, world_size)
    board = settings.tensorboard if rank == 0 else None

    def auc(model: torch.nn.Module) -> float:
        return test_auc(model, batches.in_order(test, settings.batch_size))

    dense = build(log, STOCK, settings.device, settings.seed, ROW_LEARNING_RATE)
    steps = settings.epochs * (split // settings.batch_size)
    with Reporter(dense, STOCK, steps, board and board / "dense") as reporter:
        train(dense, training_batches(batches, split, settings), reporter)
    columns = [column.name for column in log.columns if column.open_ended]
    parts = compress(dense, columns, arguments.rank, arguments.error)
    before = sum(part.dense_bytes for part in parts.values())
    after = sum(part.tt_bytes for part in parts.values())
    error = max(part.decomposition.relative_error for part in parts.values())
    stages = [Stage("dense", before, 1.0, None, auc(dense))]

    options = {name: part.options for name, part in parts.items()}
    variant = Variant("tt", "Tensor-Train tables", "tt", 1.0, tt_options=options)
    try:
        model = build(log, variant, settings.device, settings.seed, arguments.tune_rate)
    except ValueError as error:  # such as ranks that a GPU's kernels don't take
        raise DataError(str(error)) from None
    move_over(dense, model, parts)
    ratio = before / after
    stages.append(Stage("Tensor-Train", after, ratio, error, auc(model)))

    # Other orders of the rows than the dense model has seen.
    further = dataclasses.replace(settings, epochs=1_000_000, seed=settings.seed + 500)
    tuning = itertools.islice(training_batches(batches, split, further), arguments.tune_steps)
    with Reporter(model, variant, arguments.tune_steps, board and board / "tt") as reporter:
        train(model, tuning, reporter, arguments.tune_dense_rate)
    stages.append(Stage("trained on", after, ratio, None, auc(model)))
    return stages


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, MOVIELENS)
    parser.add_argument(
        "--epochs", type=positive, default=1, help="of the dense model (default: %(default)s)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--rank", type=positive, metavar="R", help="between cores (default: 16, without --error)"
    )
    size.add_argument(
        "--error",
        type=share,
        metavar="E",
        help="relative error of each table to stay below; ranks follow from it",
    )
    parser.add_argument(
        "--tune-steps",
        type=positive,
        default=300,
        help="after the compression (default: %(default)s)",
    )
    parser.add_argument(
        "--tune-rate",
        type=share,
        default=TUNE_RATE,
        help="learning rate of the tables after the compression (default: %(default)s)",
    )
    parser.add_argument(
        "--tune-dense-rate",
        type=share_or_zero,
        default=0.0,
        help="learning rate of the other layers after the compression (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.rank is None and arguments.error is None:
        arguments.rank = 16
    return arguments


def main() -> None:
    """Parses arguments, trains, compresses, prints.

    Raises:
        DataError: something is wrong with the input, in one sentence.
    """
    arguments = parse_arguments()
    log = load(arguments, TRAIN_SHARE)
    split = int(len(log) * TRAIN_SHARE)
    with processes(arguments.device) as device:
        settings = Settings.of(arguments, device)
        stages = work(log, split, arguments, settings)
        if dist.get_rank() == 0:
            for line in [COLUMNS, *(stage.cells() for stage in stages)]:
                print(f"{line[0]:14}" + "".join(f"{cell:>13}" for cell in line[1:]))
            if arguments.json:
                content = {"data": log.name, "stages": [dataclasses.asdict(s) for s in stages]}
                arguments.json.write_text(json.dumps(content, indent=2) + "\n")
                print(f"Written: {arguments.json}")


if __name__ == "__main__":
    sys.exit(run(main))
