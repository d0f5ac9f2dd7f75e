"""Operations of a hash table: ratios of batches with one id in 90 % of positions to uniform
batches.

    python -m benchmarks operations --out benchmarks/results/operations.csv
    python -m benchmarks operations --policies lru lfu --capacity 1048576 --ids 65536

One row per operation and eviction policy has milliseconds of a call with ids drawn uniformly
from the table, of a call with one id in 90 % of the positions, and their ratio. Operations that
insert are measured with ids in the table, and, as ``... new``, with ids not in it; the hot batch
then has one new id in 90 % of its positions. ``scores`` marks calls with scores; ``deterministic``
marks tables in deterministic mode.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed
from benchmarks.timing import median_ms
from torchrec_hkv import HashTable
from torchrec_hkv.hash_table import Uniform

POLICIES = ("lru", "lfu", "epoch_lru", "epoch_lfu", "customized")
TAKE_SCORES = ("lfu", "epoch_lfu", "customized")
HOT_SHARE = 0.9
LOAD = 0.75
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("operation", "policy", "scores", "deterministic", "capacity", "dim", "ids")

#: Arguments: table, ids, rows, scores or None.
Call = Callable[[HashTable, Tensor, Tensor, Tensor | None], object]


def _accumulate(table: HashTable, ids: Tensor, rows: Tensor, scores: Tensor | None) -> None:
    table.accum_or_assign(ids, rows, torch.ones_like(ids, dtype=torch.bool), scores)


def _assign_new(table: HashTable, ids: Tensor, rows: Tensor, scores: Tensor | None) -> None:
    table.accum_or_assign(ids, rows, torch.zeros_like(ids, dtype=torch.bool), scores)


#: Operations that take no scores.
WITHOUT_SCORES: dict[str, Call] = {
    "find": lambda table, ids, rows, scores: table.find(ids),
    "find_slots": lambda table, ids, rows, scores: table.find_slots(ids),
    "contains": lambda table, ids, rows, scores: table.contains(ids),
    "assign_rows": lambda table, ids, rows, scores: table.assign_rows(ids, rows),
    "erase": lambda table, ids, rows, scores: table.erase(ids),
}
WITH_SCORES: dict[str, Call] = {
    "find_or_insert": lambda table, ids, rows, scores: table.find_or_insert(ids, scores),
    "find_or_insert_slots": lambda table, ids, rows, scores: table.find_or_insert_slots(
        ids, scores
    ),
    "insert_or_assign": lambda table, ids, rows, scores: table.insert_or_assign(ids, rows, scores),
    "insert_and_evict": lambda table, ids, rows, scores: table.insert_and_evict(
        ids, rows, scores, trim=False
    ),
    "assign": lambda table, ids, rows, scores: table.assign(ids, rows, scores),
    "assign_scores": lambda table, ids, rows, scores: table.assign_scores(ids, scores),
    "accum_or_assign": _accumulate,
}
#: Operations that insert, with new ids.
INSERTING: dict[str, Call] = {
    "find_or_insert new": WITH_SCORES["find_or_insert"],
    "insert_or_assign new": WITH_SCORES["insert_or_assign"],
    "insert_and_evict new": WITH_SCORES["insert_and_evict"],
    "accum_or_assign new": _assign_new,
}
OPERATIONS = [*WITHOUT_SCORES, *WITH_SCORES, *INSERTING]


class Batches:
    """Ids of calls on one table.

    Args:
        table: the table, which is filled to :data:`LOAD`.
        n: number of ids per call.
    """

    def __init__(self, table: HashTable, n: int) -> None:
        self.table, self.n, self.device = table, n, table.device
        self.present = int(LOAD * table.capacity)
        self.given = self.present
        for part in torch.arange(self.present, device=self.device).split(1 << 20):
            self._insert(hashed(part))

    def _insert(self, ids: Tensor) -> None:
        scores = torch.ones_like(ids) if self.table.eviction == "customized" else None
        self.table.find_or_insert_slots(ids, scores)

    def _hot(self, numbers: Tensor) -> Tensor:
        hot = torch.rand(self.n, device=self.device) < HOT_SHARE
        return torch.where(hot, numbers[0], numbers)

    def calls(self, operation: str, hot: bool, number: int) -> Iterator[Tensor]:
        """Yields ids of ``number`` calls; undoes the changes of a call before the next one."""
        for _ in range(number):
            if operation in INSERTING:
                numbers = torch.arange(self.given, self.given + self.n, device=self.device)
                self.given += self.n
            else:
                numbers = torch.randint(self.present, (self.n,), device=self.device)
            ids = hashed(self._hot(numbers) if hot else numbers)
            yield ids
            if operation in INSERTING:
                self.table.erase(ids)
            if operation == "erase":
                self._insert(ids)


def _variants(operation: str, policy: str) -> tuple[bool, ...]:
    """Returns whether to measure calls without scores, with scores, or both."""
    if operation in WITHOUT_SCORES or policy not in TAKE_SCORES:
        return (False,)
    return (True,) if policy == "customized" else (False, True)


def _times(args: argparse.Namespace, table: HashTable) -> Iterator[dict[str, object]]:
    device = table.device
    rows = torch.randn(args.ids, args.dim, device=device)
    given = torch.randint(1, 100, (args.ids,), device=device)
    batches = Batches(table, args.ids)
    calls = WITHOUT_SCORES | WITH_SCORES | INSERTING
    number = args.warm + args.calls
    for name in args.operations:
        for scored in _variants(name, table.eviction):
            scores = given if scored else None
            ms = [
                median_ms(
                    lambda ids, made=calls[name], scores=scores: made(table, ids, rows, scores),
                    batches.calls(name, hot, number),
                    device,
                    args.warm,
                )
                for hot in (False, True)
            ]
            yield {
                "operation": name,
                "policy": table.eviction,
                "scores": scored,
                "deterministic": args.deterministic,
                "capacity": table.capacity,
                "dim": args.dim,
                "ids": args.ids,
                "uniform_ms": round(ms[0], 4),
                "hot_ms": round(ms[1], 4),
                "ratio": round(ms[1] / ms[0], 3),
            }


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per operation and policy, with and without scores."""
    for policy in args.policies:
        table = HashTable(
            args.dim,
            args.capacity,
            device=args.device,
            eviction=policy,
            initializer=Uniform(-0.05, 0.05),
            deterministic=args.deterministic,
        )
        yield from _times(args, table)


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--capacity", type=AtLeast(1), default=1 << 24, help="slots")
    parser.add_argument("--ids", type=AtLeast(1), default=1 << 20, help="ids a call")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--calls", type=AtLeast(1), default=7, help="timed calls a row")
    parser.add_argument("--warm", type=AtLeast(0), default=2, help="calls before them")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--deterministic", action="store_true", help="in deterministic mode")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
