"""Quality of Tensor-Train tables with additional rows for the most frequent ids, at equal bytes.

    python -m benchmarks tensor_train_hot_rows --data movietweetings_100k.dat \\
        --out benchmarks/results/tensor_train_hot_rows.csv

A click model (DLRM, dim 16, dense 32-16, over 64-32-1) has Tensor-Train tables of three cores
(Adam, .015) for users and items, with ids in the order of frequency. Streams are MovieTweetings,
and two synthetic streams with 100,000 rows, 20,000 ids per column, and popularity 1/rank^.8 and
1/rank^1.2. The first 80 % are for training, the others are the test. The most frequent ids are
known from the first step on, which a cache can't know. All variants but the first have equal bytes:

    smaller cores  without the bytes of the hot rows; shows what these bytes are worth as ranks
    replace        a hot id has a separate row, which starts from the row of the cores, as in
                   TTOptions(cache_size=...), and no longer trains the cores
    add            a hot id has the row of the cores plus a separate row, which starts from zeros

Reported are the AUC of the best epoch as a mean over seeds, and the difference to the table without
hot rows with its standard error, paired by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

from benchmarks.arguments import AtLeast
from benchmarks.environment import CsvFile
from benchmarks.quality_data import Ratings, auc, read_ratings
from torchrec_hkv.hash_table.optimizers import Adam
from torchrec_hkv.tensor_train import IdOrder, TTGroup, initial_cores, make_shape, rows_of

DIM, BATCH, CORES, RATE, DENSE_RATE = 16, 1024, 3, 0.015, 1e-3
COLUMNS = ("user", "movie")
_HOT_ROW_BYTES = 4 * DIM + 8
_ROWS, _IDS, _BIAS, _LATENT, _LATENT_SD, _TRAIN_SHARE = 100_000, 20_000, 0.8, 4, 0.7, 0.8


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of hot rows.

    Attributes:
        name: ``"plain"``, ``"smaller cores"``, ``"replace"`` or ``"add"``.
        share: share of the bytes for hot rows.
        columns: columns that have hot rows.
    """

    name: str
    share: float = 0.0
    columns: tuple[str, ...] = COLUMNS


VARIANTS = (
    Variant("plain"),
    *(Variant(name, 0.1) for name in ("smaller cores", "replace", "add")),
    *(Variant(name, 0.05, ("movie",)) for name in ("smaller cores", "replace", "add")),
)


def power_law(power: float, rows: int = _ROWS, ids: int = _IDS, seed: int = 0) -> Ratings:
    """Creates clicks that depend on a bias of each id and the interaction of two ids.

    Args:
        power: the popularity of the id with rank r is ``r ** -power``.
        rows: number of rows of the stream.
        ids: number of ids of each column.
        seed: seed of all random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.arange(ids) + 1.0).pow(-power).double()
    logits, latent, columns = torch.zeros(rows), torch.ones(rows, _LATENT), {}
    for name in COLUMNS:
        rank = torch.multinomial(weights, rows, replacement=True, generator=generator)
        columns[name] = torch.randperm(ids, generator=generator)[rank]
        logits += _BIAS * torch.randn(ids, generator=generator)[rank]
        latent *= _LATENT_SD * torch.randn(ids, _LATENT, generator=generator)[rank]
    logits += latent.sum(1)
    labels = (torch.rand(rows, generator=generator) < logits.sigmoid()).float()
    return Ratings(
        ids={**columns, "hour": torch.zeros(rows, dtype=torch.int64)},
        sizes={**dict.fromkeys(COLUMNS, ids), "hour": 1},
        dense=torch.zeros(rows, 4),
        labels=labels,
        train=int(_TRAIN_SHARE * rows),
        end=rows,
    )


class Table:
    """A Tensor-Train table with additional rows for its most frequent ids.

    Args:
        log: the log.
        column: column of the log.
        ratio: bytes of a dense table divided by the table's bytes.
        variant: variant of hot rows.
        generator: generator of the initial cores.
    """

    def __init__(
        self, log: Ratings, column: str, ratio: float, variant: Variant, generator: torch.Generator
    ) -> None:
        size = log.sizes[column]
        budget = int(4 * DIM * size / ratio)
        share = variant.share if column in variant.columns else 0.0
        self.hot = int(share * budget / _HOT_ROW_BYTES)
        self.mode = variant.name if self.hot else "plain"
        counts = torch.bincount(log.ids[column][: log.train], minlength=size)
        # Row i belongs to the id with the i-th highest count; the first rows are hot.
        self.ids = IdOrder.by_value(counts).rows_of(log.ids[column])
        left = budget - self.hot * _HOT_ROW_BYTES
        self.shape = make_shape(size, DIM, num_cores=CORES, max_bytes=left)
        std = 2 * math.sqrt(1 / size) / math.sqrt(12)
        self.cores = initial_cores(
            self.shape, "approx-normal", mean=0.0, std=std, generator=generator
        )
        self.group = TTGroup([self.shape], optimizer=Adam())
        self.states = self.group.make_states()
        self.step, self.rate = torch.zeros(1, dtype=torch.int64), torch.tensor(RATE)
        self.rows = nn.Embedding(max(1, self.hot), DIM, sparse=True)
        with torch.no_grad():
            first = torch.arange(max(1, self.hot))
            start = rows_of(self.shape, self.cores, first) if self.mode == "replace" else 0.0
            self.rows.weight.copy_(torch.zeros(len(first), DIM) + start)

    def look_up(self, positions: Tensor, training: bool) -> Tensor:
        """Looks up the ids at positions of the log. Returns rows, ``[n, DIM]``."""
        ids = self.ids[positions]
        hot = ids < self.hot
        if self.mode in ("plain", "smaller cores"):
            return self._by_cores(ids, training)
        if self.mode == "add":
            rows = self._by_cores(ids, training)
            return rows.index_add(0, hot.nonzero().flatten(), self.rows(ids[hot]))
        rows = torch.zeros(len(ids), DIM)
        rows = rows.index_put((~hot,), self._by_cores(ids[~hot], training))
        return rows.index_put((hot,), self.rows(ids[hot]))

    def _by_cores(self, ids: Tensor, training: bool) -> Tensor:
        batch = (ids, torch.tensor([0, len(ids)]), 1)
        if not training:
            return self.group.lookup(self.cores, *batch, pooled=False)
        anchor = torch.empty(0, requires_grad=True)
        tables = (anchor, self.cores, self.states, self.step)
        return self.group.lookup_fused(*tables, *batch, self.rate, pooled=False)


def train(log: Ratings, ratio: float, variant: Variant, seed: int, epochs: int) -> list[float]:
    """Returns the test AUC after each epoch.

    Args:
        log: training and test rows.
        ratio: dense bytes divided by the tables' bytes.
        variant: variant of hot rows.
        seed: seed of the model, its tables and the order of rows.
        epochs: number of epochs.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tables = [Table(log, column, ratio, variant, generator) for column in COLUMNS]
    hour = nn.Embedding(log.sizes["hour"], DIM)
    dense, interact = DenseArch(log.dense.shape[1], [32, DIM]), InteractionArch(3)
    over = OverArch(DIM + 6, [64, 32, 1])
    parameters = [*dense.parameters(), *over.parameters(), *hour.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=DENSE_RATE)
    hot_optimizer = torch.optim.SparseAdam([table.rows.weight for table in tables], lr=RATE)

    def scores(rows: Tensor, training: bool) -> Tensor:
        columns = [table.look_up(rows, training) for table in tables]
        columns.append(hour(log.ids["hour"][rows]))
        return over(interact(dense(log.dense[rows]), torch.stack(columns, 1))).squeeze(1)

    found = []
    for _ in range(epochs):
        for rows in torch.randperm(log.train, generator=generator).split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(
                scores(rows, True), log.labels[rows]
            )
            optimizer.zero_grad()
            hot_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if any(table.rows.weight.grad is not None for table in tables):
                hot_optimizer.step()
        with torch.no_grad():
            parts = torch.arange(log.train, log.end).split(8 * BATCH)
            predicted = torch.cat([scores(rows, False) for rows in parts])
        found.append(auc(predicted, log.test_labels.double()))
    return found


def measured(
    log: Ratings, ratio: float, variant: Variant, seeds: int, epochs: int, plain: Tensor | None
) -> tuple[dict[str, object], Tensor]:
    """Returns a row, and the AUC of each seed. plain: the AUCs of the plain table."""
    runs = torch.tensor([train(log, ratio, variant, seed, epochs) for seed in range(seeds)])
    best = runs.max(dim=1).values
    difference = best - (best if plain is None else plain)
    row = {
        "variant": variant.name,
        "share": variant.share,
        "columns": " ".join(variant.columns) if variant.share else "",
        "ratio": ratio,
        "auc": round(float(best.mean()), 4),
        "difference": round(float(difference.mean()), 4),
        "standard_error": round(float(difference.std()) / math.sqrt(seeds), 4),
        "seeds": seeds,
        "epochs": epochs,
    }
    return row, best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=None, help="MovieTweetings' ratings.dat")
    parser.add_argument("--powers", type=float, nargs="*", default=[0.8, 1.2], metavar="POWER")
    parser.add_argument("--ratios", type=float, nargs="+", default=[5.0, 20.0, 100.0])
    parser.add_argument("--seeds", type=AtLeast(1), default=5, help="at least 2 (default: 5)")
    parser.add_argument("--epochs", type=AtLeast(1), default=4, help="at most (default: 4)")
    parser.add_argument("--rows", type=AtLeast(1), default=_ROWS, help="of made streams")
    parser.add_argument("--threads", type=AtLeast(1), default=1)
    parser.add_argument("--out", type=Path, default=None, help="CSV file to write")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    streams = {f"power law {power:g}": power_law(power, args.rows) for power in args.powers}
    if args.data is not None:
        streams["MovieTweetings"] = read_ratings(args.data)
    with CsvFile(args.out) as file:
        for name, log in streams.items():
            for ratio in args.ratios:
                plain = None
                for variant in VARIANTS:
                    row, best = measured(log, ratio, variant, args.seeds, args.epochs, plain)
                    plain = best if plain is None else plain
                    row = {"stream": name, **row}
                    print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                    file.write(row)


if __name__ == "__main__":
    main()
