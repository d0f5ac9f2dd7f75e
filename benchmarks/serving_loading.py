"""Times to build a table for serving and to load it, compared with the rate of the disk.

    python -m benchmarks serving_loading --out benchmarks/results/serving_loading.csv
    python -m benchmarks serving_loading --checkpoint --out benchmarks/results/serving_loading.csv

Random float32 rows with ids of 64 bits are added to a table in batches, like in an export, with
``--memory`` bytes of memory; with ``--checkpoint``, they are read from a checkpoint of a hash
table. ``build_s`` is the time until the file is on the disk, without the time to create the rows.
``build_ratio`` is the time of the disk, in the same run, to sequentially read the checkpoint and
write and sync the table's bytes, divided by ``build_s``. Then the file is dropped from the page
cache and mapped. ``ready_s`` is the time until the first request of 2,000 ids is answered,
``map_ms`` its part before the request, and ``read_s`` the time until the whole file is in the page
cache. ``resident_s`` is the time to read the file into memory instead. ``read_ratio`` and
``resident_ratio`` are these rates divided by the disk's rate of sequential reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.disk import drop_from_cache, sequential_rates
from benchmarks.environment import report
from benchmarks.ids import hashed
from benchmarks.ranks import joined_ranks
from benchmarks.serving_deltas import sharded
from torchrec_hkv import checkpoint
from torchrec_hkv.serving.checkpoints import Checkpoint
from torchrec_hkv.serving.page_cache import warm
from torchrec_hkv.serving.row_formats import ROW_FORMATS
from torchrec_hkv.serving.table_builder import MEMORY_BYTES, TableBuilder, build_table
from torchrec_hkv.serving.table_file import TableFile
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

KEYS = ("source", "format", "rows", "dim", "memory")
_BATCH, _IDS = 1 << 17, 2000
_TABLE = "ebc.embedding_bags.t"


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ids and rows of the table."""
    generator = torch.Generator().manual_seed(1)
    for first in range(0, args.rows, _BATCH):
        ids = hashed(torch.arange(first, min(first + _BATCH, args.rows)))
        yield ids, torch.empty(ids.numel(), args.dim).uniform_(-1, 1, generator=generator)


def build(args: argparse.Namespace, folder: Path) -> tuple[TableFile, float]:
    """Builds the table; returns its description and the seconds that it took."""
    spent = 0.0
    with TableBuilder(args.dim, args.format, folder, args.memory) as builder:
        for ids, rows in batches(args):
            began = time.perf_counter()
            builder.add(ids, rows)
            spent += time.perf_counter() - began
        began = time.perf_counter()
        table_file = builder.finish(folder / "rows.table")
    return table_file, spent + time.perf_counter() - began


def save(args: argparse.Namespace, folder: Path) -> int:
    """Saves a model with the table to ``checkpoint``; returns the bytes of the table's files."""
    with joined_ranks(torch.device("cpu")):
        model = sharded(args)
        checkpoint.import_rows(model, _TABLE, batches(args))
        checkpoint.save(folder / "checkpoint", model)
        del model
    os.sync()
    drop_from_cache(folder)
    tables = (folder / "checkpoint" / "tables").rglob("*")
    return sum(path.stat().st_size for path in tables if path.is_file())


def build_from_checkpoint(args: argparse.Namespace, folder: Path) -> tuple[TableFile, float]:
    """Like :func:`build`, from the checkpoint of :func:`save`."""
    began = time.perf_counter()
    saved = Checkpoint(folder / "checkpoint")
    table_file = build_table(
        lambda: saved.entries(_TABLE),
        args.dim,
        args.format,
        folder / "rows.table",
        args.memory,
        saved.order(_TABLE),
    )
    return table_file, time.perf_counter() - began


def cases(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields the row of the benchmark."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        saved = save(args, folder) if args.checkpoint else 0
        table_file, build_s = (build_from_checkpoint if args.checkpoint else build)(args, folder)
        size = table_file.num_bytes
        if args.checkpoint:
            shutil.rmtree(folder / "checkpoint")
        (scratch := folder / "sequential").mkdir()
        rates = sequential_rates(scratch, min(size, args.sequential), 1, direct=args.direct)
        generator = torch.Generator().manual_seed(2)
        ids = hashed(torch.randint(0, args.rows, (_IDS,), generator=generator))

        def timed(resident: bool) -> tuple[float, float]:
            drop_from_cache(folder)
            began = time.perf_counter()
            index, rows = table_file.map(folder, resident)
            if not resident:
                reading.append(warm(folder, [(table_file, index)]))
            table = ReadOnlyTable("t", args.dim, args.format, index, rows, table_file.unit)
            tables = ReadOnlyTables([table])
            mapped = time.perf_counter() - began
            tables.rows(0, ids)
            ready = time.perf_counter() - began
            if int(tables.counters[0, 1]) != 0:
                raise RuntimeError(f"{int(tables.counters[0, 1])} ids are unknown")
            return mapped, ready

        reading: list[threading.Thread | None] = []
        began = time.perf_counter()
        map_s, ready_s = timed(False)
        for thread in filter(None, reading):
            thread.join()
        read_s = time.perf_counter() - began if reading[0] is not None else float("nan")
        resident_s = timed(True)[0]
    yield {
        "source": "checkpoint" if args.checkpoint else "memory",
        "format": args.format,
        **{"rows": args.rows, "dim": args.dim, "memory": args.memory},
        "bytes": size,
        "read_bytes": saved,
        "build_s": round(build_s, 2),
        "disk_write_gb_s": round(rates.write / 1e9, 3),
        "build_ratio": round((saved / rates.read + size / rates.write) / build_s, 3),
        "map_ms": round(1e3 * map_s, 2),
        "ready_s": round(ready_s, 3),
        "read_s": round(read_s, 3),
        "resident_s": round(resident_s, 2),
        "disk_read_gb_s": round(rates.read / 1e9, 3),
        "read_ratio": round(size / read_s / rates.read, 3),
        "resident_ratio": round(size / resident_s / rates.read, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=AtLeast(1), default=10_000_000)
    add("--dim", type=AtLeast(1), default=64)
    add("--format", choices=ROW_FORMATS, default="int8", help="(default: int8)")
    add("--memory", type=AtLeast(1), default=MEMORY_BYTES, help="of the builder, in bytes")
    add("--checkpoint", action="store_true", help="build from a checkpoint")
    add("--sequential", type=AtLeast(1), default=4 << 30, help="bytes to find the disk's rate by")
    add("--direct", action="store_true", help="which is found past the page cache")
    add("--threads", type=AtLeast(1), default=1)
    add("--folder", type=Path, default=None, help="on the disk (default: the system's)")
    add("--out", type=Path, default=None, help="CSV file; keeps rows of other runs")
    args = parser.parse_args(arguments)
    if args.rows < 1 or args.dim < 1 or args.memory < 1 or args.sequential < 1:
        parser.error("--rows, --dim, --memory and --sequential must be at least 1")
    torch.set_num_threads(args.threads)
    report(cases(args), args.out, KEYS)


if __name__ == "__main__":
    main()
