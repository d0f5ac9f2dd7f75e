"""Compresses the tables of a trained DLRM into Tensor-Train tables, and continues training.

    torchrun --nproc_per_node 2 examples/compress_dlrm.py --rank 16
    python examples/compress_dlrm.py --error 0.5

1. A DLRM with stock tables is trained on the first 80 % of the rows in time; the other 20 % are the
   test. A random part of the 80 % is kept for validation.
2. TT-SVD decomposes the large tables into Tensor-Train cores of a given rank or relative error,
   which replace the dense tables.
3. The cores are trained on the same rows with a low learning rate, to adapt to the compression. All
   other layers are frozen, because they would overfit. The state with the highest validation AUC is
   kept. Training ends when this AUC stops rising.

The example prints the test AUC of the dense model, after compression, and after the last training.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from click_batches import ClickBatch, ClickBatches, Rows
from click_data import ClickLog, DataError
from click_model import Variant, build
from click_training import (
    ROW_LEARNING_RATE,
    TRAIN_SHARE,
    Reporter,
    Settings,
    make_dense_optimizer,
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
from plot import Bars, add_plot, check_plot, write_panels
from saves import Saves, add_saves, check_saves
from tensor_train_tables import compress, local_tensors, move_over

from torchrec_hkv.planner.report import format_bytes

STOCK = Variant("dense", "dense tables", "fused", 1.0)
# Higher learning rates destroy what the dense model has learned, on some data in a hundred steps.
TUNE_RATE = 0.005
# Number of validations without a new highest AUC after which training of the cores ends.
PATIENCE = 4
COLUMNS = ["model", "table bytes", "ratio", "error", "test AUC"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """The figures of one model; ``error`` is the largest relative error of a table."""

    model: str
    table_bytes: int
    ratio: float
    error: float | None
    auc: float

    def cells(self) -> list[str]:
        """Returns the cells of the printed table."""
        size = format_bytes(self.table_bytes)
        error = "" if self.error is None else f"{self.error:.3f}"
        return [self.model, size, f"{self.ratio:.1f}", error, f"{self.auc:.4f}"]


class BestState:
    """Keeps the state of a model with the highest validation AUC. The initial state counts, too.

    Args:
        model: the model; set to training mode after each validation.
        auc: returns the model's current AUC, the same on all ranks.
    """

    def __init__(self, model: torch.nn.Module, auc: Callable[[], float]) -> None:
        self.model = model
        self.auc = auc
        self.step = 0
        self.steps = 0
        self.first = self.highest = auc()
        self._state = self._copies()
        self._without_gain = 0

    def watch(self, batches: Iterable[ClickBatch], every: int) -> Iterator[ClickBatch]:
        """Yields the batches, and validates after every ``every`` batches and after the last one.

        Ends when the AUC has not risen for ``PATIENCE`` validations. A batch has been trained when
        the next one is requested.
        """
        for step, batch in enumerate(batches, start=1):
            yield batch
            self.steps = step
            if step % every == 0:
                self._validate()
                if self._without_gain == PATIENCE:
                    return
        if self.steps % every:
            self._validate()

    def restore(self) -> None:
        """Loads the best state into the model."""
        state = self.model.state_dict()
        for key, tensor in state.items():
            for part, saved in zip(local_tensors(tensor), self._state[key], strict=True):
                part.copy_(saved)
        self.model.load_state_dict(state)

    def _validate(self) -> None:
        auc = self.auc()
        self.model.train()
        self._without_gain += 1
        if auc > self.highest:
            self.step, self.highest, self._without_gain = self.steps, auc, 0
            self._state = self._copies()

    def _copies(self) -> dict[str, list[torch.Tensor]]:
        return {
            key: [part.detach().clone() for part in local_tensors(tensor)]
            for key, tensor in self.model.state_dict().items()
        }


def parts_of(split: int, share: float, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits the rows before ``split`` into training and validation rows, each in order.

    Raises:
        DataError: the training rows do not fill a batch.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(split, generator=generator)
    validating = int(share * split)
    if split - validating < settings.batch_size:
        raise DataError(
            f"--validation-share {share} leaves {split - validating} rows to train on, but a batch "
            f"has {settings.batch_size}: lower it or --batch-size."
        )
    return order[validating:].sort().values, order[:validating].sort().values


def work(
    log: ClickLog, split: int, arguments: argparse.Namespace, settings: Settings
) -> list[Stage]:
    """Trains, compresses, and trains the cores."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    test = range(split, len(log))
    batches = ClickBatches(log, STOCK, settings.device, rank, world_size)
    board = settings.tensorboard if rank == 0 else None

    training, validation = parts_of(split, arguments.validation_share, settings)

    def auc(model: torch.nn.Module, rows: Rows = test) -> float:
        return test_auc(model, batches.in_order(rows, settings.batch_size))

    dense = build(log, STOCK, settings.device, settings.seed, ROW_LEARNING_RATE)
    optimizer = make_dense_optimizer(dense)
    saves = Saves(dense, optimizer, "dense", settings.save, settings.resume)
    done = int(saves.resume()[0])
    steps = max(settings.epochs - done, 0) * (len(training) // settings.batch_size)
    with Reporter(dense, STOCK, steps, board and board / "dense") as reporter:
        train(
            dense, training_batches(batches, training, settings, done, saves), reporter, optimizer
        )
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
    except ValueError as error:  # such as ranks that the GPU kernels don't support
        raise DataError(str(error)) from None
    move_over(dense, model, parts)
    ratio = before / after
    stages.append(Stage("Tensor-Train", after, ratio, error, auc(model)))

    best = BestState(model, lambda: auc(model, validation)) if len(validation) else None
    # Another seed, so that orders of the rows differ from those of the dense model.
    further = dataclasses.replace(settings, epochs=1_000_000, seed=settings.seed + 500)
    tuning = itertools.islice(training_batches(batches, training, further), arguments.tune_steps)
    with Reporter(model, variant, arguments.tune_steps, board and board / "tt") as reporter:
        if best is not None:
            tuning = best.watch(tuning, arguments.validate_every)
        optimizer = make_dense_optimizer(model, arguments.tune_dense_rate)
        train(model, tuning, reporter, optimizer)
    if best is not None:
        best.restore()
        if rank == 0:
            print(
                f"kept the state after {best.step} of {best.steps} steps: validation AUC "
                f"{best.first:.4f} before, {best.highest:.4f} then"
            )
    Saves(model, optimizer, "tt", settings.save, None).save(len(stages))
    stages.append(Stage("trained on", after, ratio, None, auc(model)))
    return stages


def draw(path: Path, name: str, stages: list[Stage]) -> None:
    """Draws the test AUC and the size of the tables of each model."""
    panels = [
        Bars("test AUC", {stage.model: stage.auc for stage in stages}, 0.5),
        Bars("MiB of tables", {stage.model: stage.table_bytes / 2**20 for stage in stages}),
    ]
    write_panels(path, name, panels)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, MOVIELENS)
    parser.add_argument(
        "--epochs",
        type=positive,
        default=1,
        help="epochs of the dense model (default: %(default)s)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--rank",
        type=positive,
        metavar="R",
        help="rank between cores (default: 16, without --error)",
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
        help="maximal number of steps after the compression (default: %(default)s)",
    )
    parser.add_argument(
        "--validate-every",
        type=positive,
        default=25,
        metavar="STEPS",
        help="steps after the compression between validations (default: %(default)s)",
    )
    parser.add_argument(
        "--validation-share",
        type=share_or_zero,
        default=0.05,
        metavar="SHARE",
        help="share of the training rows that validate the compressed tables; 0 keeps the last "
        "state (default: %(default)s)",
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
    add_plot(parser, "test AUC and table bytes of the models")
    add_saves(parser, "of the dense model after each epoch, and of the compressed one at the end")
    arguments = parser.parse_args()
    if arguments.rank is None and arguments.error is None:
        arguments.rank = 16
    return arguments


def main() -> None:
    """Parses arguments, trains, compresses, prints.

    Raises:
        DataError: the input is invalid.
    """
    arguments = parse_arguments()
    check_plot(arguments.plot)
    check_saves(arguments)
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
            if arguments.plot:
                draw(arguments.plot, log.name, stages)


if __name__ == "__main__":
    sys.exit(run(main))
