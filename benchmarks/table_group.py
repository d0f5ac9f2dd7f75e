"""Operations of a ``TableGroup``: one call for all tables, compared with one call per table.

    python -m benchmarks.table_group --out benchmarks/results/table_group.csv

The axes are number of tables, load factor and hit rate. All tables together have ``--capacity``
rows and get ``--ids`` ids per call, for any number of tables; their dims cycle through ``--dims``.
Ids are drawn uniformly. New ids of a call are erased after it, untimed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed
from benchmarks.timing import median_ms
from torchrec_hkv import HashTable
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform

#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("operation", "tables", "dims", "capacity", "load_factor", "present", "ids")


@dataclasses.dataclass(frozen=True)
class Batch:
    """The ids of a call, for the group and by table.

    Attributes:
        ids: int64 ``[n]``, one table after the other.
        offsets: int64 ``[tables + 1]``.
        parts: ids of each table.
    """

    ids: Tensor
    offsets: Tensor
    parts: tuple[Tensor, ...]


class Tables:
    """A group, or separate tables with equal contents; only one of the two is filled.

    Args:
        args: arguments of the command.
        number: number of tables.
        grouped: whether to use the group.
    """

    def __init__(self, args: argparse.Namespace, number: int, grouped: bool) -> None:
        device = torch.device(args.device)
        initializer = Uniform(-0.05, 0.05)
        dims = [args.dims[table % len(args.dims)] for table in range(number)]
        capacity = args.capacity // number
        specs = [
            TableSpec(f"t{table}", capacity, dim, initializer=initializer)
            for table, dim in enumerate(dims)
        ]
        self.group = TableGroup(specs, range(number), device=device) if grouped else None
        self.tables = [
            HashTable(dim, capacity, device=device, name=spec.name, initializer=initializer)
            for spec, dim in zip(specs, dims, strict=True)
            if not grouped
        ]
        n = args.ids // number
        self.n, self.number, self.device = n, number, device
        self.rows = [torch.randn(n, dim, device=device) for dim in dims]
        self.joined = self.group.join_rows(self.rows) if self.group is not None else None
        self.filled = self.given = 0

    def batch(self, numbers: list[Tensor]) -> Batch:
        """Creates a batch from the ids' numbers by table."""
        parts = [hashed(part * self.number + table) for table, part in enumerate(numbers)]
        lengths = torch.tensor([0] + [len(part) for part in parts])
        return Batch(torch.cat(parts), lengths.cumsum(0).to(self.device), tuple(parts))

    def fill(self, load: float, capacity: int) -> None:
        """Inserts each table's ids with numbers 0, 1, …, up to the load factor."""
        target = int(load * capacity / self.number)
        while self.filled < target:
            n = min(self.n, target - self.filled)
            numbers = torch.arange(self.filled, self.filled + n, device=self.device)
            self.insert(self.batch([numbers] * self.number))
            self.filled += n
        self.given = max(self.given, 1 << 40)

    def mixed(self, present: float) -> tuple[Batch, Batch]:
        """Returns ids for a call, with this share in the tables, and their new ids."""
        old = round(present * self.n)
        new = torch.arange(self.given, self.given + self.n - old, device=self.device)
        self.given += self.n - old
        there = [torch.randint(self.filled, (old,), device=self.device) for _ in range(self.number)]
        order = torch.randperm(self.n, device=self.device)
        batch = self.batch([torch.cat([part, new])[order] for part in there])
        return batch, self.batch([new] * self.number)

    def _do(self, group: Callable[..., object], table: Callable[..., object]) -> None:
        """Makes one call, or one call per table."""
        if self.group is not None:
            group(self.group)
        for index, one in enumerate(self.tables):
            table(one, index)

    def find(self, batch: Batch) -> None:
        self._do(
            lambda group: group.find_rows(batch.ids, batch.offsets, 1),
            lambda table, at: table.find(batch.parts[at]),
        )

    def insert(self, batch: Batch) -> None:
        self._do(
            lambda group: group.find_or_insert_slots(batch.ids, batch.offsets, 1),
            lambda table, at: table.find_or_insert_slots(batch.parts[at]),
        )

    def insert_or_assign(self, batch: Batch) -> None:
        self._do(
            lambda group: group.insert_or_assign(batch.ids, batch.offsets, 1, self.joined),
            lambda table, at: table.insert_or_assign(batch.parts[at], self.rows[at]),
        )

    def assign(self, batch: Batch) -> None:
        self._do(
            lambda group: group.assign(batch.ids, batch.offsets, 1, self.joined),
            lambda table, at: table.assign(batch.parts[at], self.rows[at]),
        )

    def erase(self, batch: Batch) -> None:
        self._do(
            lambda group: group.erase(batch.ids, batch.offsets, 1),
            lambda table, at: table.erase(batch.parts[at]),
        )


#: By name: the call, and shares of present ids.
OPERATIONS: dict[str, tuple[Callable[[Tables, Batch], None], tuple[float, ...]]] = {
    "find": (Tables.find, (1.0, 0.5)),
    "find_or_insert_slots": (Tables.insert, (1.0, 0.6)),
    "insert_or_assign": (Tables.insert_or_assign, (1.0, 0.6)),
    "assign": (Tables.assign, (1.0,)),
}


def _inputs(tables: Tables, present: float, args: argparse.Namespace) -> Iterator[Batch]:
    for _ in range(args.calls + 2):
        batch, new = tables.mixed(present)
        yield batch
        tables.erase(new)


def _times(args: argparse.Namespace, number: int, grouped: bool) -> dict[tuple[object, ...], float]:
    """Returns milliseconds by load factor, operation and share of present ids."""
    tables, times = Tables(args, number, grouped), {}
    for load in args.loads:
        tables.fill(load, args.capacity)
        for name, (call, shares) in OPERATIONS.items():
            for present in shares:
                inputs = _inputs(tables, present, args)
                times[load, name, present] = median_ms(
                    lambda batch, call=call: call(tables, batch), inputs, tables.device
                )
    return times


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per number of tables, load factor, operation and share of present ids."""
    for number in args.tables:
        apart = _times(args, number, grouped=False)
        for key, ms in _times(args, number, grouped=True).items():
            load, name, present = key
            yield {
                "operation": name,
                "tables": number,
                "dims": " ".join(map(str, args.dims)),
                "capacity": args.capacity,
                "load_factor": load,
                "present": present,
                "ids": args.ids,
                "group_ms": round(ms, 4),
                "tables_ms": round(apart[key], 4),
                "giga_ids_per_s": round(args.ids / ms / 1e-3 / 2**30, 3),
            }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--capacity", type=AtLeast(1), default=1 << 24, help="of all tables together"
    )
    parser.add_argument(
        "--ids", type=AtLeast(1), default=1 << 20, help="ids a call, for all tables"
    )
    parser.add_argument("--calls", type=AtLeast(1), default=9, help="timed calls a row")
    parser.add_argument("--tables", type=AtLeast(1), nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--dims", type=AtLeast(1), nargs="+", default=[64, 32])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
