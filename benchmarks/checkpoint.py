"""Saves and loads a sharded hash table, compared with sequential writes and reads of the disk.

    python -m benchmarks.checkpoint --bytes 50e9 --out benchmarks/results/checkpoint.csv

One process has one table under ``DistributedModelParallel``, and runs
``torchrec_hkv.checkpoint.save`` and ``.load``. If two models fit into a GPU, it loads into another
model and compares digests. That model holds other ids, so files are verified before it changes, and
read twice. With ``--untouched`` the model is empty, as when a job starts, and files are read once.

Before each save, the same number of threads writes the same number of bytes in pieces of 16 MiB,
syncs and reads them, first without the page cache, then up to 4 GB through it. The faster of both
is the disk's rate. These files are deleted before the save, so the disk only needs room for the
checkpoint. Rates are file bytes in GB/s (10^9 bytes). ``save_peak_mb`` and ``load_peak_mb`` are the
peaks of the host memory that the process allocates in addition.

Each stage prints a line when it ends. With ``--time-limit``, a stage that would exceed the limit at
the disk's rate is skipped, and its columns are empty; the sequential files stop at a quarter of the
limit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
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

from benchmarks.arguments import AtLeast
from benchmarks.disk import Rates, drop_from_cache, sequential_rates
from benchmarks.environment import report
from benchmarks.ranks import device_of_rank, joined_ranks
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    checkpoint,
    get_default_sharders,
)
from torchrec_hkv.checkpoint.defaults import THREADS
from torchrec_hkv.hash_table.files.block_files import BLOCK, BlockFile, block_memory, host_memory

KEYS = ("table_device", "gigabytes", "dim", "optimizer", "eviction", "untouched", "repeat")
#: Optimizer, its arguments, and number of float32 state values of a row with ``dim`` columns.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float], Callable[[int], int]]]
OPTIMIZERS = {
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}, lambda dim: 1),
    "adam": (torch.optim.Adam, {"lr": 0.1}, lambda dim: 2 * dim),
}


def make_model(args: argparse.Namespace, rows: int, device: torch.device) -> nn.Module:
    """Creates a sharded model with one table of this capacity."""
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
        ddr_cap=1 << 42,  # the planner must not check memory
    )
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(collection, sharders, dist.group.WORLD)
    return DistributedModelParallel(collection, device=device, plan=plan, sharders=sharders)


def fill(model: nn.Module, rows: int, device: torch.device) -> None:
    """Inserts this number of ids."""
    lookup = model.module.group_lookups()["t"]
    step = 1 << 18
    for first in range(0, rows, step):
        ids = torch.arange(first, min(first + step, rows), device=device) * 0x9E3779B97F4A7C1
        offsets = torch.tensor([0, ids.numel()], device=device)
        lookup(ids, offsets, None, 1, torch.tensor(0.0, device=device))


def peak_mb() -> float:
    """Returns the peak memory of the process since its last reset."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status if "VmHWM" in line)


def timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Returns the seconds, and the peak of additional host memory in megabytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_mb()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, peak_mb() - before


class Progress:
    """Prints progress and the remaining time.

    Args:
        limit: time limit in seconds from now.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._begin = time.perf_counter()

    @property
    def left(self) -> float:
        """Returns the remaining seconds."""
        return self.limit - (time.perf_counter() - self._begin)

    def say(self, what: str) -> None:
        """Prints one line."""
        print(f"[{time.perf_counter() - self._begin:6.1f} s] {what}", file=sys.stderr, flush=True)

    def allows(self, what: str, seconds: float) -> bool:
        """Returns whether this number of seconds remains; prints a line if not."""
        if seconds <= self.left:
            return True
        self.say(f"{what} left out: some {seconds:.0f} s, {self.left:.0f} s are left")
        return False


def disk_rates(folder: Path, size: int, threads: int, progress: Progress) -> Rates:
    """Returns the higher rates of those without and with the page cache."""
    folder.mkdir()
    found = []
    for direct, maximum in ((True, size), (False, min(size, 4_000_000_000))):
        rates = sequential_rates(
            folder, maximum, threads, direct=direct, seconds=progress.limit / (8 if direct else 32)
        )
        way = "past" if direct else "through"
        progress.say(
            f"disk, {maximum / 1e9:.3f} GB {way} the page cache by {threads} threads: writes "
            f"{rates.write / 1e9:.3f} GB/s, reads {rates.read / 1e9:.3f} GB/s"
        )
        found.append(rates)
    folder.rmdir()
    return Rates(max(r.write for r in found), max(r.read for r in found))


def goes_past_the_cache(folder: Path, device: torch.device) -> bool:
    """Returns whether direct IO works with the folder's file system and the device's host
    memory."""
    memory = block_memory(BLOCK, pin=device.type == "cuda").zero_()
    path = folder / "block"
    file = BlockFile(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    file.write_blocks(host_memory(memory), 0)
    direct = file.is_direct
    file.close()
    path.unlink()
    return direct


def fits_twice(args: argparse.Namespace, device: torch.device) -> bool:
    """Returns whether a second model fits beside the existing model."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return free > 1.3 * args.bytes + (1 << 30)


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Yields one row per repetition."""
    progress = Progress(args.time_limit)
    device = torch.device(args.device)
    entry = 4 * (args.dim + OPTIMIZERS[args.optimizer][2](args.dim)) + 20
    entry += 8 * (args.eviction == "lfu")
    rows = args.bytes // entry
    model = make_model(args, rows, device)
    fill(model, rows, device)
    direct = goes_past_the_cache(folder, device)
    progress.say(f"files {'go' if direct else 'do not go'} past the page cache here")
    progress.say(f"a table of {rows:,} rows on {device}")
    digest = checkpoint.digest(model)
    progress.say("its digest")
    path = folder / "checkpoint"
    options = {"threads": args.threads, "batch_bytes": args.batch_mb * 1_000_000}
    warm = make_model(args, 1000, device)
    fill(warm, 900, device)
    checkpoint.save(folder / "warm", warm)  # warms up imports and threads
    checkpoint.load(folder / "warm", warm)
    del warm
    for repeat in range(args.repeat):
        shutil.rmtree(path, ignore_errors=True)
        disk = disk_rates(folder / "disk", args.bytes, args.threads, progress)
        if not progress.allows("the save", args.bytes / disk.write):
            return
        os.sync()
        saved_s, save_peak = timed(partial(checkpoint.save, path, model, **options), device)
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        total = sum(sizes)
        progress.say(
            f"saved {total / 1e9:.3f} GB in {saved_s:.2f} s: {total / saved_s / 1e9:.3f} GB/s, "
            f"{total / saved_s / disk.write:.2f} of the disk's rate"
        )
        loaded = {"load_s": "", "load_gb_s": "", "load_over_disk": "", "load_peak_mb": ""}
        reads = 1 if args.untouched else 2
        if progress.allows("the load", reads * total / disk.read):
            loaded_s, peak = load(args, model, rows, path, digest, options, progress)
            loaded = {
                "load_s": round(loaded_s, 2),
                "load_gb_s": round(total / loaded_s / 1e9, 3),
                "load_over_disk": round(total / loaded_s / disk.read, 2),
                "load_peak_mb": round(peak, 1),
            }
        yield {
            "table_device": device.type,
            "gigabytes": round(total / 1e9, 3),
            "rows": rows,
            "dim": args.dim,
            "optimizer": args.optimizer,
            "eviction": args.eviction,
            "files": len(sizes),
            "threads": args.threads,
            "batch_mb": args.batch_mb,
            "past_cache": direct,
            "untouched": args.untouched,
            "repeat": repeat,
            "disk_write_gb_s": round(disk.write / 1e9, 3),
            "disk_read_gb_s": round(disk.read / 1e9, 3),
            "save_s": round(saved_s, 2),
            "save_gb_s": round(total / saved_s / 1e9, 3),
            "save_over_disk": round(total / saved_s / disk.write, 2),
            "save_peak_mb": round(save_peak, 1),
            **loaded,
        }


def load(
    args: argparse.Namespace,
    model: nn.Module,
    rows: int,
    path: Path,
    digest: dict[str, str],
    options: dict[str, int],
    progress: Progress,
) -> tuple[float, float]:
    """Loads and compares the model. Returns seconds and megabytes of the load."""
    device = torch.device(args.device)
    if args.same_model or not fits_twice(args, device):
        target, where = model, "the saved model, changed meanwhile"
        fill(target, max(1, rows // 1000), device)
    else:
        target, where = make_model(args, rows, device), "another model"
        if not args.untouched:
            fill(target, rows // 2, device)
    drop_from_cache(path)
    seconds, peak = timed(partial(checkpoint.load, path, target, **options), device)
    progress.say(f"loaded into {where} in {seconds:.2f} s")
    if checkpoint.digest(target) != digest:
        raise RuntimeError("what was loaded is not what was saved.")
    progress.say("the digests are equal")
    return seconds, peak


def num_bytes(text: str) -> int:
    """Parses a number of bytes of an option."""
    return int(float(text))


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=num_bytes, default=10**9, help="of entries, such as 50e9")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="rowwise_adagrad")
    parser.add_argument("--eviction", choices=["lru", "lfu"], default="lfu")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--hbm-bytes", type=AtLeast(1), help="HBM the table may take; all by default"
    )
    parser.add_argument("--threads", type=AtLeast(1), default=THREADS)
    parser.add_argument("--batch-mb", type=AtLeast(1), default=100)
    parser.add_argument("--repeat", type=AtLeast(1), default=1, help="saves and loads")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument(
        "--same-model", action="store_true", help="load into the saved model although two fit"
    )
    parser.add_argument(
        "--untouched", action="store_true", help="load into a model without entries, if two fit"
    )
    parser.add_argument("--out", type=Path, help="CSV file; keeps rows of other runs")
    args = parser.parse_args(arguments)
    # Measures the disk of the folder of temporary files; TMPDIR sets it.
    with (
        joined_ranks(device_of_rank(args.device)),
        tempfile.TemporaryDirectory(prefix="torchrec_hkv_") as folder,
    ):
        report(measure(args, Path(folder)), args.out, KEYS)


if __name__ == "__main__":
    main()
