"""Operations of ``HashTable``, one a row, in 2^30 ids a second.

    python -m benchmarks.hash_table --out benchmarks/results/hash_table.csv
    python -m benchmarks.hash_table --hbm 1.0 0.1 0.0 --power 1.05 --dims 64 --loads 0.75

The axes: dim, load factor, share of the ids that are in the table, and share of the rows in HBM
(others are in pinned host memory). Ids are drawn from random slots, uniformly or by a power law.
Below load factor 1 each call's new ids are erased after it, untimed, so that the load factor stays.
Rows are written as they come; a run that is stopped keeps those it has.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import report
from benchmarks.ids import Ids
from benchmarks.timing import median_ms
from torchrec_hkv import HashTable
from torchrec_hkv.hash_table import Uniform
from torchrec_hkv.hash_table.table_memory import table_memory

#: ``insert_and_evict`` without the wait that cutting its result to size takes, where it can.
_EVICT = (
    {"trim": False} if "trim" in inspect.signature(HashTable.insert_and_evict).parameters else {}
)

Call = Callable[[Tensor], object]

#: By operation: the call on a table and rows to write, and the shares of ids that are present.
OPERATIONS: dict[str, tuple[Callable[[HashTable, Tensor], Call], tuple[float, ...]]] = {
    "find_slots": (lambda table, rows: table.find_slots, (1.0, 0.5, 0.0)),
    "find": (lambda table, rows: table.find, (1.0, 0.5, 0.0)),
    "find_or_insert_slots": (lambda table, rows: table.find_or_insert_slots, (1.0, 0.6, 0.0)),
    "find_or_insert": (lambda table, rows: table.find_or_insert, (1.0, 0.6, 0.0)),
    "insert_or_assign": (
        lambda table, rows: lambda ids: table.insert_or_assign(ids, rows),
        (1.0, 0.6, 0.0),
    ),
    "insert_and_evict": (
        lambda table, rows: lambda ids: table.insert_and_evict(ids, rows, **_EVICT),
        (1.0, 0.6, 0.0),
    ),
}


def make_table(args: argparse.Namespace, dim: int, share: float) -> HashTable:
    """A table with this share of its rows in HBM."""
    device = torch.device(args.device)
    hbm_bytes = None
    if share < 1:
        if device.type != "cuda":
            raise ValueError(f"hbm is {share}, but must be 1 on a device without HBM.")
        memory = table_memory(args.capacity, dim, 0, "lru")
        wanted = memory.index_bytes + int(share * memory.num_slots * memory.row_bytes)
        hbm_bytes = max(wanted, memory.least_hbm_bytes)
    return HashTable(
        dim, args.capacity, device=device, initializer=Uniform(-0.05, 0.05), hbm_bytes=hbm_bytes
    )


def _inputs(
    ids: Ids, present: float, args: argparse.Namespace, keep_load: bool
) -> Iterator[Tensor]:
    """Ids of the calls, drawn one call after the other."""
    for _ in range(args.calls + args.warm):
        yield ids.mixed(args.ids, present)
        if keep_load:
            ids.forget()


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row a dim, share in HBM, load factor, operation and share of ids that are present."""
    device = torch.device(args.device)
    for dim in args.dims:
        rows = torch.randn(args.ids, dim, device=device)
        for share in args.hbm:
            table = make_table(args, dim, share)
            ids = Ids(table, args.power)
            for load in args.loads:
                ids.fill(load)
                for name in args.operations:
                    make_call, hit_rates = OPERATIONS[name]
                    for present in hit_rates if args.present is None else args.present:
                        inputs = _inputs(ids, present, args, keep_load=load < 1)
                        ms = median_ms(make_call(table, rows), inputs, device, args.warm)
                        yield {
                            "operation": name,
                            "dim": dim,
                            "capacity": table.capacity,
                            "load_factor": round(table.load_factor, 3),
                            "present": present,
                            "hbm_share": share,
                            "power": args.power,
                            "ids": args.ids,
                            "ms": round(ms, 4),
                            "giga_ids_per_s": round(args.ids / ms / 1e-3 / 2**30, 3),
                        }
            del table, ids


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--capacity", type=int, default=1 << 26)
    parser.add_argument("--ids", type=int, default=1 << 20, help="ids a call")
    parser.add_argument("--calls", type=int, default=9, help="timed calls a row")
    parser.add_argument(
        "--warm",
        type=int,
        default=2,
        help="calls before them; with --hbm below 1 rows move until the hot ones are in HBM",
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 0.95, 1.0])
    parser.add_argument(
        "--present", type=float, nargs="+", help="shares; by default three for each operation"
    )
    parser.add_argument("--hbm", type=float, nargs="+", default=[1.0], help="shares of the rows")
    parser.add_argument("--power", type=float, default=0.0, help="of a power law; 0: uniform")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out)


if __name__ == "__main__":
    main()
