"""Operations of ``HashTable``, one per row, in 2^30 ids per second.

    python -m benchmarks.hash_table --out benchmarks/results/hash_table.csv
    python -m benchmarks.hash_table --hbm 1.0 0.1 0.0 --power 1.05 --dims 64 --loads 0.75

The axes are dim, load factor, hit rate (``present``: the share of the ids that are in the table),
and tiers (``hbm_share``: the share of the rows in HBM; below 1, all rows are also in pinned host
memory). Ids are drawn from random slots, uniformly or by a power law. Changes of the load factor by
a call are undone after it, untimed. ``erase_if`` and ``export`` scan the whole table, and ``ids``
is the number of its slots; ``erase_if`` finds nothing to erase, and ``export`` takes the first
batch of entries. Rows are written as they arrive, so an interrupted run keeps its finished rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import IdPool
from benchmarks.timing import median_ms
from torchrec_hkv import HashTable
from torchrec_hkv.hash_table import Uniform
from torchrec_hkv.hash_table.table_memory import table_memory

#: ``insert_and_evict`` without the wait for the size of its result, if possible.
_EVICT = (
    {"trim": False} if "trim" in inspect.signature(HashTable.insert_and_evict).parameters else {}
)

#: The ids of a call, and whether each is in the table.
Input = tuple[Tensor, Tensor]
Call = Callable[[Input], object]
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("operation", "dim", "capacity", "load_factor", "present", "hbm_share", "power", "ids")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation to measure.

    Attributes:
        call: creates the call from a table and rows to write.
        present: default shares of ids that are in the table.
        adds: whether new ids of the call are in the table after it.
        removes: whether ids of the call are not in the table after it.
        by_slots: whether the call scans all slots, independent of the ids.
    """

    call: Callable[[HashTable, Tensor], Call]
    present: tuple[float, ...] = (1.0,)
    adds: bool = False
    removes: bool = False
    by_slots: bool = False


_MIXED, _NEW = (1.0, 0.5, 0.0), (1.0, 0.6, 0.0)
OPERATIONS: dict[str, Operation] = {
    "find_slots": Operation(lambda table, rows: lambda c: table.find_slots(c[0]), _MIXED),
    "contains": Operation(lambda table, rows: lambda c: table.contains(c[0]), _MIXED),
    "find": Operation(lambda table, rows: lambda c: table.find(c[0]), _MIXED),
    "find_or_insert_slots": Operation(
        lambda table, rows: lambda c: table.find_or_insert_slots(c[0]), _NEW, adds=True
    ),
    "find_or_insert": Operation(
        lambda table, rows: lambda c: table.find_or_insert(c[0]), _NEW, adds=True
    ),
    "insert_or_assign": Operation(
        lambda table, rows: lambda c: table.insert_or_assign(c[0], rows), _NEW, adds=True
    ),
    "insert_and_evict": Operation(
        lambda table, rows: lambda c: table.insert_and_evict(c[0], rows, **_EVICT), _NEW, adds=True
    ),
    "accum_or_assign": Operation(
        lambda table, rows: lambda c: table.accum_or_assign(c[0], rows, c[1]), _NEW, adds=True
    ),
    "assign": Operation(lambda table, rows: lambda c: table.assign(c[0], rows), _MIXED),
    "assign_rows": Operation(lambda table, rows: lambda c: table.assign_rows(c[0], rows), _MIXED),
    "assign_scores": Operation(lambda table, rows: lambda c: table.assign_scores(c[0]), _MIXED),
    "erase": Operation(lambda table, rows: lambda c: table.erase(c[0]), _MIXED, removes=True),
    "erase_if": Operation(
        lambda table, rows: lambda c: table.erase_if(older_than=1 << 40), by_slots=True
    ),
    "export": Operation(
        lambda table, rows: lambda c: next(table.export(batch_size=len(rows))), by_slots=True
    ),
}


def make_table(args: argparse.Namespace, dim: int, share: float) -> HashTable:
    """Creates a table with this share of its rows in HBM."""
    device = torch.device(args.device)
    hbm_bytes = None
    if share < 1:
        if device.type != "cuda":
            raise ValueError(f"hbm is {share}, but must be 1 on a device without HBM.")
        memory = table_memory(args.capacity, dim, 0, "lru")
        budget = memory.index_bytes + int(share * memory.num_slots * memory.row_bytes)
        hbm_bytes = max(budget, memory.least_hbm_bytes)
    return HashTable(
        dim, args.capacity, device=device, initializer=Uniform(-0.05, 0.05), hbm_bytes=hbm_bytes
    )


def _inputs(
    ids: IdPool, operation: Operation, present: float, load: float, args: argparse.Namespace
) -> Iterator[Input]:
    """Draws the inputs of one call after the other."""
    for _ in range(args.calls + args.warm):
        batch = ids.mixed(args.ids, present)
        yield batch, ids.table.contains(batch)
        if operation.adds and load < 1:
            ids.forget()
        if operation.removes:
            ids.fill(load)


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per dim, share in HBM, load factor, operation and share of present ids."""
    device = torch.device(args.device)
    for dim in args.dims:
        rows = torch.randn(args.ids, dim, device=device)
        for share in args.hbm:
            table = make_table(args, dim, share)
            ids = IdPool(table, args.power)
            for load in args.loads:
                ids.fill(load)
                for name in args.operations:
                    operation = OPERATIONS[name]
                    given = operation.by_slots or args.present is None
                    for present in operation.present if given else args.present:
                        inputs = _inputs(ids, operation, present, load, args)
                        call = operation.call(table, rows)
                        ms = median_ms(call, inputs, device, args.warm)
                        number = table.capacity if operation.by_slots else args.ids
                        yield {
                            "operation": name,
                            "dim": dim,
                            "capacity": table.capacity,
                            "load_factor": round(table.load_factor, 3),
                            "present": present,
                            "hbm_share": share,
                            "power": args.power,
                            "ids": number,
                            "ms": round(ms, 4),
                            "giga_ids_per_s": round(number / ms / 1e-3 / 2**30, 3),
                        }
            del table, ids


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--capacity", type=AtLeast(1), default=1 << 26)
    parser.add_argument("--ids", type=AtLeast(1), default=1 << 20, help="ids a call")
    parser.add_argument("--calls", type=AtLeast(1), default=9, help="timed calls a row")
    parser.add_argument(
        "--warm",
        type=AtLeast(0),
        default=2,
        help="calls before them; with --hbm below 1 rows move until the hot ones are in HBM",
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--dims", type=AtLeast(1), nargs="+", default=[16, 64, 128])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 0.95, 1.0])
    parser.add_argument(
        "--present", type=float, nargs="+", help="shares; by default three for each operation"
    )
    parser.add_argument("--hbm", type=float, nargs="+", default=[1.0], help="shares of the rows")
    parser.add_argument("--power", type=float, default=0.0, help="of a power law; 0: uniform")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
