"""Non-blocking saves: time of the call, and slowdown of the training steps during the save.

    python -m benchmarks non_blocking --bytes 20e9 --out benchmarks/results/non_blocking.csv

One process has one table under ``DistributedModelParallel``. Training steps of ``--batch`` random
ids run for ``--seconds``. Then ``checkpoint.save(..., blocking=False)`` is called, and steps
continue until the save has ended, or for ``--seconds``, after which the save is cancelled and
``written_share`` is its progress. With ``--delta SHARE``, a :class:`DeltaWriter` writes a delta
instead, after a base; all steps look up ids of this share of the rows. Its first write is not
counted, because later writes reuse the memory that it allocates.

``stop_ms`` is the time of the call with its work on the GPU, during which training waits;
``blocked_ms`` is the part that waits for the disk because there is no memory for copies.
``step_ms`` and ``step_meanwhile_ms`` are means; ``slower_percent`` compares them, and
``slower_median_percent`` compares the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.arguments import AtLeast
from benchmarks.checkpoint import OPTIMIZERS, Progress, fill, make_model, num_bytes
from benchmarks.deltas import wait
from benchmarks.environment import report
from benchmarks.ranks import device_of_rank, joined_ranks
from torchrec_hkv import checkpoint
from torchrec_hkv.write_behind import STAGING_BYTES, THREADS

STEPS_TOGETHER = 8


def steps(
    model: nn.Module, rows: int, batch: int, device: torch.device, goes_on: Callable[[], bool]
) -> list[float]:
    """Returns milliseconds of training steps on random ids of the table.

    The host waits for the device after some steps, as in training that sometimes reads the loss.
    """
    lookup = model.module.group_lookups()["t"]
    rate = torch.tensor(0.1, device=device)
    offsets = torch.arange(batch + 1, device=device)
    times = []
    while goes_on():
        batches = [
            torch.randint(0, rows, (batch,), device=device) * 0x9E3779B97F4A7C1
            for _ in range(STEPS_TOGETHER)
        ]
        wait(device)
        begin = time.perf_counter()
        for ids in batches:
            out = lookup(ids, offsets, None, batch, rate)
            out.backward(out.detach())
        wait(device)
        passed = 1e3 * (time.perf_counter() - begin)
        times += [passed / STEPS_TOGETHER] * STEPS_TOGETHER
    return times


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Yields one row per save."""
    progress = Progress(float("inf"))
    device = torch.device(args.device)
    payload = 4 * (args.dim + OPTIMIZERS[args.optimizer][2](args.dim))
    entry = payload + 20 + 8 * (args.eviction == "lfu")
    rows = args.bytes // entry
    model = make_model(args, rows, device)
    fill(model, rows, device)
    wait(device)
    progress.say(f"a table of {rows:,} rows on {device}")
    warm = make_model(args, 1000, device)
    fill(warm, 900, device)
    checkpoint.save(folder / "warm", warm, blocking=False).wait()  # warm-up
    del warm
    staging = {
        "staging_bytes": args.staging_bytes,
        "device_staging_bytes": args.device_staging_bytes,
        "threads": args.threads,
    }
    writer = None
    if args.delta:
        writer = checkpoint.DeltaWriter(model, folder / "chain", blocking=False, **staging)
        writer.write(blocking=True)
        progress.say("a base")
    trained = rows if writer is None else max(1, int(rows * args.delta))
    steps(model, trained, args.batch, device, _for_seconds(1.0))
    if writer is not None:
        writer.write().wait()
    for _ in range(args.repeat):
        before = steps(model, trained, args.batch, device, _for_seconds(args.seconds))
        wait(device)
        begin = time.perf_counter()
        if writer is None:
            handle = checkpoint.save(folder / "saved", model, blocking=False, **staging)
        else:
            handle = writer.write()
        wait(device)
        stop = time.perf_counter() - begin
        progress.say(f"a call of {1e3 * stop:.0f} ms")
        goes_on = _for_seconds(args.seconds, unless=handle.done)
        meanwhile = steps(model, trained, args.batch, device, goes_on)
        share = handle.progress
        if handle.done() or writer is not None:
            handle.wait()
            share = 1.0
        else:
            with contextlib.suppress(RuntimeError, TimeoutError):
                handle.abort(TimeoutError("The time of the benchmark is up."))
        seconds = time.perf_counter() - begin
        written = share * (args.bytes if writer is None else rows * args.delta * entry)
        progress.say(f"{share:.2f} of it written in {seconds:.1f} s, beside {len(meanwhile)} steps")
        yield {
            "table_device": device.type,
            "what": "save" if writer is None else f"delta of {args.delta:g}",
            "rows": rows,
            "dim": args.dim,
            "optimizer": args.optimizer,
            "eviction": args.eviction,
            "batch": args.batch,
            "threads": args.threads,
            "gb": round((args.bytes if writer is None else rows * args.delta * entry) / 1e9, 3),
            "stop_ms": round(1e3 * stop, 1),
            "blocked_ms": round(1e3 * handle.blocked_seconds, 1),
            "device_staged_gb": round(handle.device_staged_bytes / 1e9, 3),
            "staged_gb": round(handle.staged_bytes / 1e9, 3),
            "step_ms": round(statistics.mean(before), 3),
            "step_meanwhile_ms": round(statistics.mean(meanwhile), 3) if meanwhile else "",
            "slower_percent": _slower(before, meanwhile, statistics.mean),
            "slower_median_percent": _slower(before, meanwhile, statistics.median),
            "steps_meanwhile": len(meanwhile),
            "written_share": round(share, 3),
            "write_gb_s": round(written / seconds / 1e9, 3),
        }


def _slower(
    before: list[float], meanwhile: list[float], middle: Callable[[list[float]], float]
) -> float | str:
    return round(100 * (middle(meanwhile) / middle(before) - 1), 1) if meanwhile else ""


def _for_seconds(seconds: float, unless: Callable[[], bool] = lambda: False) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end and not unless()


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=num_bytes, default=10**9, help="of entries, such as 50e9")
    parser.add_argument("--delta", type=float, default=0.0, metavar="SHARE", help="of the rows")
    parser.add_argument("--seconds", type=float, default=15.0, help="of steps, before and at most")
    parser.add_argument("--batch", type=AtLeast(1), default=65536, help="ids of a training step")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="rowwise_adagrad")
    parser.add_argument("--eviction", choices=["lru", "lfu"], default="lru")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--hbm-bytes", type=AtLeast(1), help="HBM the table may take; all by default"
    )
    parser.add_argument("--staging-bytes", type=num_bytes, default=STAGING_BYTES)
    parser.add_argument("--device-staging-bytes", type=num_bytes, help="by default what is free")
    parser.add_argument("--threads", type=AtLeast(1), default=THREADS)
    parser.add_argument("--repeat", type=AtLeast(1), default=1, help="saves")
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
