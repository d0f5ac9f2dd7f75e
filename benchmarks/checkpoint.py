"""Saving and loading a sharded hash table, beside what the disk writes and reads in sequence.

    python -m benchmarks.checkpoint --gigabytes 50 --out benchmarks/results/checkpoint.csv

One process with one table under ``DistributedModelParallel``: ``torchrec_hkv.checkpoint.save`` and
``.load``, the load into a fresh model, whose digest is compared. In the same run, before and after
each, files of the same sizes are written by one thread in pieces of 16 MiB and synced, and read
again. Files are dropped from the page cache before they are read. Rates are of file bytes, in
gigabytes of 10^9 a second; ``save_over_disk`` and ``load_over_disk`` are to the mean of the two
rates beside. ``peak_mb`` is what the process took of host memory at most beyond what it had before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.environment import report
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    checkpoint,
    get_default_sharders,
)

PIECE = 16 << 20
#: Optimizer, its arguments, and float32 values of state a row of ``dim`` columns keeps.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float], Callable[[int], int]]]
OPTIMIZERS = {
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}, lambda dim: 1),
    "adam": (torch.optim.Adam, {"lr": 0.1}, lambda dim: 2 * dim),
}


def make_model(args: argparse.Namespace, rows: int, device: torch.device) -> nn.Module:
    """A sharded model of one table with room for so many rows."""
    capacity = int(rows / 0.9)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t", num_embeddings=capacity, embedding_dim=args.dim, feature_names=["f"]
            )
        ],
        device=torch.device("meta"),
    )
    kind, arguments, _ = OPTIMIZERS[args.optimizer]
    apply_optimizer_in_backward(kind, collection.parameters(), dict(arguments))
    options = HKVOptions(eviction=args.eviction, hbm_bytes=args.hbm_bytes)
    constraints = {
        "t": ParameterConstraints(
            compute_kernels=["hkv"], sharding_types=["row_wise"], options=options
        )
    }
    topology = Topology(
        world_size=1,
        compute_device=device.type,
        hbm_cap=1 << 40,
        ddr_cap=1 << 42,  # whether it fits is not asked here
    )
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(collection, sharders, dist.group.WORLD)
    return DistributedModelParallel(collection, device=device, plan=plan, sharders=sharders)


def fill(model: nn.Module, rows: int, device: torch.device) -> None:
    """Inserts so many ids."""
    lookup = model.module.group_lookups()["t"]
    step = 1 << 18
    for first in range(0, rows, step):
        ids = torch.arange(first, min(first + step, rows), device=device) * 0x9E3779B97F4A7C1
        offsets = torch.tensor([0, ids.numel()], device=device)
        with torch.no_grad():
            lookup(ids, offsets, None, 1, torch.tensor(0.0, device=device))


def drop_from_cache(folder: Path) -> None:
    """So that what is read next comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rates(folder: Path, sizes: list[int]) -> tuple[float, float]:
    """Bytes a second that one thread writes, synced, and reads, in files of these sizes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    data = memoryview(bytearray(os.urandom(PIECE)))
    begin = time.perf_counter()
    for index, size in enumerate(sizes):
        with open(folder / str(index), "wb", buffering=0) as file:
            for first in range(0, size, PIECE):
                file.write(data[: min(PIECE, size - first)])
            os.fsync(file.fileno())
    written = time.perf_counter() - begin
    drop_from_cache(folder)
    begin = time.perf_counter()
    for index in range(len(sizes)):
        with open(folder / str(index), "rb", buffering=0) as file:
            while file.readinto(data):
                pass
    read = time.perf_counter() - begin
    shutil.rmtree(folder)
    return sum(sizes) / written, sum(sizes) / read


def peak_mb() -> float:
    """The most that the process has had in memory since it was last forgotten."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status if "VmHWM" in line)


def timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds, and megabytes of host memory beyond those before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_mb()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, peak_mb() - before


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """One row a repetition."""
    device = torch.device(args.device)
    entry = 4 * (args.dim + OPTIMIZERS[args.optimizer][2](args.dim)) + 20
    rows = int(args.gigabytes * 1e9 / entry)
    model = make_model(args, rows, device)
    fill(model, rows, device)
    digest = checkpoint.digest(model)
    path = folder / "checkpoint"
    options = {"threads": args.threads, "batch_bytes": args.batch_mb * 1_000_000}
    warm = make_model(args, 1000, device)
    fill(warm, 900, device)
    checkpoint.save(folder / "warm", warm)  # imports, and threads that begin
    checkpoint.load(folder / "warm", warm)
    del warm
    sizes: list[int] = []
    for _ in range(args.repeat):
        rates = [disk_rates(folder / "disk", sizes)] if sizes else []
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        saved_s, save_peak = timed(partial(checkpoint.save, path, model, **options), device)
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        rates.append(disk_rates(folder / "disk", sizes))
        drop_from_cache(path)
        target = model
        if not args.same_model:
            target = make_model(args, rows, device)
            fill(target, rows // 2, device)
        else:
            fill(model, rows // 1000, device)
        loaded_s, load_peak = timed(partial(checkpoint.load, path, target, **options), device)
        rates.append(disk_rates(folder / "disk", sizes))
        if checkpoint.digest(target) != digest:
            raise RuntimeError("what was loaded is not what was saved.")
        del target
        total = sum(sizes) / 1e9
        write = sum(rate for rate, _ in rates) / len(rates) / 1e9
        read = sum(rate for _, rate in rates) / len(rates) / 1e9
        yield {
            "table_device": device.type,
            "gigabytes": round(total, 3),
            "rows": rows,
            "dim": args.dim,
            "optimizer": args.optimizer,
            "eviction": args.eviction,
            "files": len(sizes),
            "threads": args.threads,
            "batch_mb": args.batch_mb,
            "save_s": round(saved_s, 2),
            "save_gb_s": round(total / saved_s, 3),
            "disk_write_gb_s": round(write, 3),
            "save_over_disk": round(total / saved_s / write, 2),
            "load_s": round(loaded_s, 2),
            "load_gb_s": round(total / loaded_s, 3),
            "disk_read_gb_s": round(read, 3),
            "load_over_disk": round(total / loaded_s / read, 2),
            "save_peak_mb": round(save_peak, 1),
            "load_peak_mb": round(load_peak, 1),
        }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of entries, 10^9 bytes")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="rowwise_adagrad")
    parser.add_argument("--eviction", choices=["lru", "lfu"], default="lfu")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hbm-bytes", type=int, help="HBM the table may take; all by default")
    parser.add_argument("--threads", type=int, default=checkpoint.files.THREADS)
    parser.add_argument("--batch-mb", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=2, help="saves and loads")
    parser.add_argument(
        "--same-model", action="store_true", help="load into the saved model, where two don't fit"
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    if torch.device(args.device).type == "cuda":
        torch.cuda.set_device(torch.device(args.device).index or 0)
    dist.init_process_group(
        "nccl" if torch.device(args.device).type == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    # The disk is that of the folder of temporary files: TMPDIR says which.
    try:
        with tempfile.TemporaryDirectory(prefix="torchrec_hkv_") as folder:
            report(measure(args, Path(folder)), args.out)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
