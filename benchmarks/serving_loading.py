"""Building of a table for serving, and how soon it is ready, beside the rate of the disk.

    python -m benchmarks serving_loading --out benchmarks/results/serving_loading.csv

Random float32 rows with ids of 64 bits are added to a table in batches, as an export does it, with
``--memory`` bytes of memory. ``build_s`` is the time until the file is on the disk, less the time
that the rows took to make; ``build_ratio`` is the file's rate over the rate at which as many bytes
are written in sequence, and synced, in the same run. The file is then dropped from the page cache
and mapped: ``ready_s`` is the time until the first request of 2,000 ids is answered, ``map_ms`` the
part of it before the request. ``resident_s`` is the time to read the file into memory instead,
``resident_ratio`` its rate over that of reading in sequence.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.disk import drop_from_cache, sequential_rates
from benchmarks.environment import report
from benchmarks.ids import hashed
from torchrec_hkv.serving.row_formats import ROW_FORMATS
from torchrec_hkv.serving.table_builder import MEMORY_BYTES, TableBuilder
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

KEYS = ("format", "rows", "dim", "memory")
_BATCH, _IDS = 1 << 17, 2000


def build(args: argparse.Namespace, folder: Path) -> tuple[object, float]:
    """Builds the table; returns its description and the seconds that it took."""
    generator = torch.Generator().manual_seed(1)
    builder = TableBuilder(args.dim, args.format, folder, args.memory)
    spent = 0.0
    for first in range(0, args.rows, _BATCH):
        ids = hashed(torch.arange(first, min(first + _BATCH, args.rows)))
        rows = torch.empty(ids.numel(), args.dim).uniform_(-1, 1, generator=generator)
        began = time.perf_counter()
        builder.add(ids, rows)
        spent += time.perf_counter() - began
    began = time.perf_counter()
    made = builder.finish(folder / "rows.table")
    return made, spent + time.perf_counter() - began


def cases(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The row of the benchmark."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        made, build_s = build(args, folder)
        size = made.num_bytes
        (scratch := folder / "sequential").mkdir()
        rates = sequential_rates(scratch, min(size, args.sequential), 1, direct=args.direct)
        generator = torch.Generator().manual_seed(2)
        ids = hashed(torch.randint(0, args.rows, (_IDS,), generator=generator))

        def timed(resident: bool) -> tuple[float, float]:
            drop_from_cache(folder)
            began = time.perf_counter()
            index, rows = made.map(folder, resident)
            table = ReadOnlyTable("t", args.dim, args.format, index, rows, made.unit)
            tables = ReadOnlyTables([table])
            mapped = time.perf_counter() - began
            tables.rows(0, ids)
            ready = time.perf_counter() - began
            if int(tables.counters[0, 1]) != 0:
                raise RuntimeError(f"{int(tables.counters[0, 1])} ids are unknown")
            return mapped, ready

        map_s, ready_s = timed(False)
        resident_s = timed(True)[0]
    yield {
        "format": args.format,
        **{"rows": args.rows, "dim": args.dim, "memory": args.memory},
        "bytes": size,
        "build_s": round(build_s, 2),
        "disk_write_gb_s": round(rates.write / 1e9, 3),
        "build_ratio": round(size / build_s / rates.write, 3),
        "map_ms": round(1e3 * map_s, 2),
        "ready_s": round(ready_s, 3),
        "resident_s": round(resident_s, 2),
        "disk_read_gb_s": round(rates.read / 1e9, 3),
        "resident_ratio": round(size / resident_s / rates.read, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=10_000_000)
    add("--dim", type=int, default=64)
    add("--format", choices=ROW_FORMATS, default="int8", help="(default: int8)")
    add("--memory", type=int, default=MEMORY_BYTES, help="of the builder, in bytes")
    add("--sequential", type=int, default=4 << 30, help="bytes to find the disk's rate by")
    add("--direct", action="store_true", help="which is found past the page cache")
    add("--threads", type=int, default=1)
    add("--folder", type=Path, default=None, help="on the disk (default: the system's)")
    add("--out", type=Path, default=None, help="CSV file; keeps rows of other runs")
    args = parser.parse_args(arguments)
    if args.rows < 1 or args.dim < 1 or args.memory < 1 or args.sequential < 1:
        parser.error("--rows, --dim, --memory and --sequential must be at least 1")
    torch.set_num_threads(args.threads)
    report(cases(args), args.out, KEYS)


if __name__ == "__main__":
    main()
