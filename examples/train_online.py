"""Trains online: makes one pass in order of time, and predicts each period before training on it.

    torchrun --nproc_per_node 2 examples/train_online.py --data movietweetings.dat

New users and movies keep arriving, and get rows in hash tables. Ids without a lookup in the last
--expire-after periods are removed with their optimizer states. If a table is full, the least
recently used ids are evicted. For each period, the example prints the AUC of predictions made
before training on it, and the numbers of new, expired and evicted ids.

With --deltas FOLDER, each period ends with saving the changes since the last period. A run that is
killed can continue from there, with any number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from click_batches import ClickBatch, ClickBatches
from click_data import SECONDS_A_DAY, ClickLog, DataError
from click_model import Variant, build
from click_training import ROW_LEARNING_RATE, auc, gather, make_dense_optimizer
from launch import MOVIELENS, load, make_parser, positive, processes, run, share
from plot import Curves, add_plot, check_plot, write_panels
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchrec_hkv import checkpoint
from torchrec_hkv.metrics import ConsoleLine, TableMetrics, TensorBoard, collect

#: Number of periods between bases of a chain.
BASE_EVERY = 10
COLUMNS = ["period", "rows", "new ids", "AUC", "loss", "ids held", "expired", "evicted"]


@dataclasses.dataclass(frozen=True)
class Period:
    """The figures of one period. ``auc`` and ``loss`` are for predictions before training on it."""

    number: int
    rows: int
    new_ids: float
    auc: float
    loss: float
    metrics: TableMetrics

    def cells(self) -> list[str]:
        """Returns the cells of the printed table."""
        figures = [f"{self.number}", f"{self.rows:,}", f"{self.new_ids:.0%}"]
        figures += [f"{self.auc:.4f}", f"{self.loss:.4f}", f"{self.metrics.size:,}"]
        return [*figures, f"{self.metrics.expired:,}", f"{self.metrics.evicted:,}"]


def periods_of(log: ClickLog, days: int, minimum: int) -> list[range]:
    """Splits the rows into periods of ``days`` days and at least ``minimum`` rows; into ten equal
    parts if the log has no times.

    Raises:
        DataError: there are fewer than two periods.
    """
    if log.seconds is None:
        bounds = np.linspace(0, len(log), 11).astype(int).tolist()
    else:
        number = (log.seconds - log.seconds[0]) // (days * SECONDS_A_DAY)
        bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(log)]
    periods: list[range] = []
    for begin, end in itertools.pairwise(bounds):
        if periods and (len(periods[-1]) < minimum or len(log) - begin < minimum):
            begin = periods.pop().start
        periods.append(range(begin, end))
    if len(periods) < 2:
        raise DataError(f"The log has {len(periods)} period of {days} days: name fewer days.")
    return periods


def new_share(log: ClickLog, rows: range) -> float:
    """Returns the share of ids of open-ended columns that did not occur before."""
    shares = [
        1 - np.isin(column.ids[rows.start : rows.stop], column.ids[: rows.start]).mean()
        for column in log.columns
        if column.open_ended
    ]
    return float(np.mean(shares))


def steps_in(rows: range, batch_size: int) -> int:
    return math.ceil(len(rows) / batch_size)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[ClickBatch]) -> tuple[float, float]:
    """Returns AUC and loss of all ranks' predictions."""
    model.eval()
    logits, labels, real = [], [], []
    for batch in batches:
        logits.append(model(batch.dense, batch.sparse).squeeze(1))
        labels.append(batch.labels)
        real.append(batch.real)
    is_real = gather(torch.cat(real))
    all_logits, all_labels = gather(torch.cat(logits))[is_real], gather(torch.cat(labels))[is_real]
    loss = nn.functional.binary_cross_entropy_with_logits(all_logits, all_labels)
    return auc(all_logits, all_labels), loss.item()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[ClickBatch]
) -> None:
    """Makes one pass. Padding rows of the last batch do not count."""
    model.train()
    for batch in batches:
        logits = model(batch.dense, batch.sparse).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, reduction="none"
        )
        optimizer.zero_grad()
        ((losses * batch.real).sum() / batch.real.sum().clamp(min=1)).backward()
        optimizer.step()


class Saved:
    """Saves the state after each period in a chain of deltas.

    Args:
        folder: folder of the chain.
        model: the sharded model.
        optimizer: optimizer of the dense parameters.
    """

    def __init__(
        self, folder: Path, model: DistributedModelParallel, optimizer: KeyedOptimizerWrapper
    ) -> None:
        self._folder, self._model = folder, model
        self._optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", optimizer)])
        # As a buffer, it is saved and loaded with the model.
        model.module.register_buffer("periods_done", torch.zeros((), dtype=torch.int64))
        self._writer = checkpoint.DeltaWriter(
            model, folder, self._optimizer, base_every=BASE_EVERY, keep_bases=2
        )

    def resume(self) -> int:
        """Loads the newest state, if there is one; returns the number of its training periods."""
        if not any(self._folder.glob("base-*")):
            return 0
        try:
            self._writer.resume()
        except ValueError as error:
            raise DataError(str(error)) from None
        return int(self._model.module.periods_done)

    def write(self, periods: int) -> None:
        """Writes the state after this many periods."""
        self._model.module.periods_done.fill_(periods)
        self._writer.write()


def learn(log: ClickLog, arguments: argparse.Namespace, device: torch.device) -> list[Period]:
    """Evaluates and trains all periods; rank 0 prints a line for each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    periods = periods_of(log, arguments.days, arguments.batch_size)
    mean = sum(steps_in(rows, arguments.batch_size) for rows in periods) / len(periods)
    expire = round(arguments.expire_after * mean) if arguments.expire_after else None
    variant = Variant(
        "online", "online", "hkv", arguments.rows, eviction="lru", expire_after=expire
    )
    model = build(log, variant, device, arguments.seed, ROW_LEARNING_RATE)
    optimizer = make_dense_optimizer(model)
    saved = None if arguments.deltas is None else Saved(arguments.deltas, model, optimizer)
    first = 0 if saved is None else saved.resume()
    if first == len(periods):
        raise DataError(f"{arguments.deltas} holds the state after the last period already.")
    batches = ClickBatches(log, variant, device, rank, world_size)
    done: list[Period] = []
    before = TableMetrics()
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(ConsoleLine("online", len(periods), shown=rank == 0))
        board = None
        if arguments.tensorboard and rank == 0:
            board = stack.enter_context(TensorBoard(arguments.tensorboard))
        for number, rows in enumerate(periods[first:], start=first + 1):
            score, loss = evaluate(model, batches.in_order(rows, arguments.batch_size))
            train(model, optimizer, batches.in_order(rows, arguments.batch_size))
            if saved is not None:
                saved.write(number)
            metrics = collect(model, dist.group.WORLD)
            total = sum(metrics.values(), TableMetrics())
            recent = total.since(before)
            before = total
            done.append(Period(number, len(rows), new_share(log, rows), score, loss, recent))
            line(number, metrics)
            line.update(number, samples=rows.stop, AUC=score, loss=loss)
            if board is not None:
                board(number, metrics)
                board.scalars(number, AUC=score, loss=loss)
    return done


def report(done: list[Period]) -> dict[str, float]:
    """Prints a table; returns means over the periods after the first fifth, weighted by rows."""
    lines = [COLUMNS, *(period.cells() for period in done)]
    for line in lines:
        print("".join(f"{cell:>10}" for cell in line))
    later = done[max(1, len(done) // 5) :] or done
    rows = sum(period.rows for period in later)
    means = {
        "auc": sum(period.auc * period.rows for period in later) / rows,
        "loss": sum(period.loss * period.rows for period in later) / rows,
    }
    print(
        f"mean of the last {len(later)} periods: AUC {means['auc']:.4f}, loss {means['loss']:.4f}"
    )
    return means


def draw(path: Path, name: str, done: list[Period]) -> None:
    """Draws the AUC of each period, and the number of ids in the tables after it."""
    auc = [(period.number, period.auc) for period in done]
    sizes = [(period.number, period.metrics.size) for period in done]
    panels = [
        Curves("period", "AUC before training on it", {"AUC": auc}),
        Curves("period", "ids held", {"ids": sizes}),
    ]
    write_panels(path, name, panels)


def main() -> None:
    """Parses arguments, learns, prints.

    Raises:
        DataError: the input is invalid.
    """
    parser = make_parser(__doc__, MOVIELENS)
    parser.add_argument(
        "--days",
        type=positive,
        default=7,
        help="days of a period (default: %(default)s); a log without times is cut in ten parts",
    )
    parser.add_argument(
        "--expire-after",
        type=positive,
        metavar="PERIODS",
        help="remove ids without a lookup for this many periods (default: keep them)",
    )
    parser.add_argument(
        "--rows",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="rows of a table for each id that its column will ever have (default: %(default)s)",
    )
    add_plot(parser, "the AUC of each period, and the ids held after it")
    parser.add_argument(
        "--deltas",
        type=Path,
        metavar="FOLDER",
        help="save what changed after each period, and continue from what the folder holds",
    )
    arguments = parser.parse_args()
    check_plot(arguments.plot)
    log = load(arguments)
    with processes(arguments.device) as device:
        done = learn(log, arguments, device)
        if dist.get_rank() == 0:
            means = report(done)
            if arguments.json:
                content = {"data": log.name, **means}
                content["periods"] = [dataclasses.asdict(period) for period in done]
                arguments.json.write_text(json.dumps(content, indent=2) + "\n")
            if arguments.plot:
                draw(arguments.plot, log.name, done)


if __name__ == "__main__":
    sys.exit(run(main))
