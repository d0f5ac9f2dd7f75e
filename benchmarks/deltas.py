"""Bytes and times of deltas of a sharded hash table.

    python -m benchmarks.deltas --bytes 28e9 --share 0.01 --out benchmarks/results/deltas.csv

One process has one table under ``DistributedModelParallel``. It writes a base, then deltas, each
after lookups of ``--share`` of the rows. ``bytes_ratio`` is the size of a delta's folder divided by
the bytes of the rows and states that were looked up since the last delta. ``write_over_disk`` is
the delta's rate divided by the disk's rate of sequential writes in the same run. ``step_ms`` is the
median time of a training step of ``--batch`` ids without a writer, and ``step_with_writer_ms`` the
same with a writer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.arguments import AtLeast
from benchmarks.checkpoint import (
    OPTIMIZERS,
    Progress,
    disk_rates,
    fill,
    make_model,
    num_bytes,
    timed,
)
from benchmarks.environment import report
from benchmarks.ranks import device_of_rank, joined_ranks
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.defaults import THREADS
from torchrec_hkv.checkpoint.record import Record


def step_ms(model: nn.Module, rows: int, batch: int, device: torch.device) -> float:
    """Returns median milliseconds of a training step on random ids of the table."""
    lookup = model.module.group_lookups()["t"]
    rate = torch.tensor(0.1, device=device)
    offsets = torch.arange(batch + 1, device=device)
    times = []
    for _ in range(30):
        ids = torch.randint(0, rows, (batch,), device=device) * 0x9E3779B97F4A7C1
        wait(device)
        begin = time.perf_counter()
        out = lookup(ids, offsets, None, batch, rate)
        out.backward(out.detach())
        wait(device)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[10:])


def wait(device: torch.device) -> None:
    """Waits for the device if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def look_up(model: nn.Module, rows: int, count: int, device: torch.device) -> None:
    """Runs a training lookup of ``count`` random ids of the table."""
    lookup = model.module.group_lookups()["t"]
    for ids in torch.randint(0, rows, (count,), device=device).split(1 << 16):
        offsets = torch.tensor([0, ids.numel()], device=device)
        rate = torch.tensor(0.1, device=device)
        lookup(ids * 0x9E3779B97F4A7C1, offsets, None, 1, rate).sum().backward()


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Yields one row per delta."""
    progress = Progress(float("inf"))
    device = torch.device(args.device)
    payload = 4 * (args.dim + OPTIMIZERS[args.optimizer][2](args.dim))
    rows = args.bytes // (payload + 20 + 8 * (args.eviction == "lfu"))
    model = make_model(args, rows, device)
    fill(model, rows, device)
    progress.say(f"a table of {rows:,} rows on {device}")
    before = step_ms(model, rows, args.batch, device)
    disk = disk_rates(folder / "disk", max(10**8, int(args.bytes * args.share)), 4, progress)
    writer = checkpoint.DeltaWriter(model, folder / "chain", threads=args.threads)
    base_s, _ = timed(writer.write, device)
    progress.say(f"a base in {base_s:.2f} s")
    after = step_ms(model, rows, args.batch, device)
    writer.write()
    for _ in range(args.repeat):
        look_up(model, rows, int(rows * args.share), device)
        wait(device)
        seconds, peak = timed(writer.write, device)
        path = max((folder / "chain").glob("delta-*"))
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        (table,) = Record.read(path).tables.values()
        entries = table.shards[0].entries
        progress.say(f"a delta of {entries:,} rows, {size / 1e6:.1f} MB, in {seconds:.3f} s")
        yield {
            "table_device": device.type,
            "rows": rows,
            "dim": args.dim,
            "optimizer": args.optimizer,
            "eviction": args.eviction,
            "batch": args.batch,
            "threads": args.threads,
            "step_ms": round(before, 3),
            "step_with_writer_ms": round(after, 3),
            "delta_rows": entries,
            "delta_mb": round(size / 1e6, 1),
            "bytes_ratio": round(size / (entries * payload), 3),
            "write_s": round(seconds, 3),
            "write_gb_s": round(size / seconds / 1e9, 3),
            "disk_write_gb_s": round(disk.write / 1e9, 3),
            "write_over_disk": round(size / seconds / disk.write, 2),
            "write_peak_mb": round(peak, 1),
        }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=num_bytes, default=10**9, help="of entries, such as 28e9")
    parser.add_argument("--share", type=float, default=0.01, help="of the rows, looked up")
    parser.add_argument("--batch", type=AtLeast(1), default=65536, help="ids of a training step")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="rowwise_adagrad")
    parser.add_argument("--eviction", choices=["lru", "lfu"], default="lru")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--hbm-bytes", type=AtLeast(1), help="HBM the table may take; all by default"
    )
    parser.add_argument("--threads", type=AtLeast(1), default=THREADS)
    parser.add_argument("--repeat", type=AtLeast(1), default=3, help="deltas")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    # Measures the disk of the folder of temporary files; TMPDIR sets it.
    with (
        joined_ranks(device_of_rank(args.device)),
        tempfile.TemporaryDirectory(prefix="torchrec_hkv_") as folder,
    ):
        report(measure(args, Path(folder)), args.out)


if __name__ == "__main__":
    main()
