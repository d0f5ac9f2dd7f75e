"""A sync of replicas of a hash table with a share of changed rows, compared with an all-reduce.

    torchrun --nproc_per_node 2 -m benchmarks.sync --out benchmarks/results/sync.csv

Each rank has a replica of one table. Between two syncs, each replica looks up and trains a share
``--changed`` of the rows in one batch, with different rows in each replica. The benchmark measures
wall time (``…_ms``) and the processor time of the process (``…_cpu_ms``), which other load affects
less, on the slowest rank, of

- ``sync``: a whole sync: finding changes, the exchange, and writing the merged rows;
- ``look``: the part of the sync that scans all slots;
- ``all_reduce``: an all-reduce of rows and states of a table with the same number of rows, as in
  ``DMPCollection`` for stock tables, without the division.

``sync_bytes`` and ``all_reduce_bytes`` are the bytes that a rank sends; an all-reduce of n bytes
counts as ``2 n (replicas - 1) / replicas``. ``bytes_ratio``, ``time_ratio`` and ``cpu_ratio`` are
ratios of the sync to the all-reduce. ``--rows-beyond`` adds computed rows for larger tables, marked
in ``source``, in which all figures are proportional to the number of rows.

With ``--backend gloo``, two replicas can share one GPU, which NCCL refuses.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.arguments import AtLeast
from benchmarks.ids import hashed
from benchmarks.ranks import device_of_rank, report_once
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec
from torchrec_hkv.hash_table.replicas import GroupSync, Wire
from torchrec_hkv.hash_table.replicas.changes import ReplicaChanges

KEYS = ("source", "replicas", "rows", "dim", "changed", "eviction", "backend")
_TIMED = ("look", "sync", "all_reduce")
_LOAD = 0.85
#: Ids per call that fills the table.
_FILL = 1 << 18


def main(arguments: list[str] | None = None) -> None:
    """Measures one table with several shares of changed rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=AtLeast(1), default=1 << 20, help="ids in the table")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--changed", type=float, nargs="+", default=[0.001, 0.01, 0.05])
    parser.add_argument("--eviction", default="lru", choices=("lru", "lfu"))
    parser.add_argument("--rounds", type=AtLeast(1), default=7)
    parser.add_argument("--rows-beyond", type=AtLeast(0), nargs="*", default=[10**8])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.backend == "gloo" and args.device == "cuda":
        device = torch.device("cuda", 0)
    else:
        device = device_of_rank(args.device)
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend)
    try:
        report_once(_rows(args, device, backend), args.out, KEYS)
    finally:
        gc.collect()  # objects in reference cycles would keep process groups after their end here
        dist.destroy_process_group()


def _rows(args: argparse.Namespace, device: torch.device, backend: str) -> Iterator[dict]:
    spec = TableSpec("t", int(args.rows / _LOAD), args.dim, args.eviction)
    group = TableGroup([spec], [0], RowWiseAdagrad(), device)
    wire = Wire(dist.group.WORLD)
    ids = hashed(torch.arange(args.rows)).to(device)
    for part in ids.split(_FILL):
        _train(group, part)
    sync = GroupSync(group, [0], wire)
    width = args.dim + 1
    table = torch.zeros(args.rows * width, device=device)
    generator = torch.Generator().manual_seed(wire.rank)
    for changed in args.changed:
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in _TIMED}
        for _ in range(args.rounds):
            n = int(changed * args.rows)
            chosen = torch.randperm(args.rows, generator=generator)[:n].to(device)
            _train(group, ids[chosen])
            changes = ReplicaChanges(group, 0, 64 << 20)
            _train(group, ids[chosen])
            times["look"].append(_timed(changes.find_changes, device))
            times["sync"].append(_timed(sync.sync, device))
            times["all_reduce"].append(_timed(lambda: dist.all_reduce(table), device))
        measured = {}
        for name, values in times.items():
            wall, cpu = zip(*values[1:], strict=True)
            measured[f"{name}_ms"] = statistics.median(wall)
            measured[f"{name}_cpu_ms"] = statistics.median(cpu)
        chosen = torch.randperm(args.rows, generator=generator)[:n].to(device)
        _train(group, ids[chosen])
        done = sync.sync()
        row = {
            "source": "measured",
            "replicas": wire.size,
            "rows": args.rows,
            "dim": args.dim,
            "changed": changed,
            "eviction": args.eviction,
            "backend": backend,
            "touched": done.touched,
            "sync_bytes": done.sent_bytes,
            "all_reduce_bytes": 2 * 4 * width * args.rows * (wire.size - 1) // wire.size,
            **measured,
        }
        yield _with_ratios(row)
        for rows in args.rows_beyond:
            scale = rows / args.rows
            scaled = ("touched", "sync_bytes", "all_reduce_bytes", *measured)
            beyond = {name: row[name] * scale for name in scaled}
            yield _with_ratios({**row, **beyond, "source": "computed", "rows": rows})


def _with_ratios(row: dict) -> dict:
    return {
        **{name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()},
        "bytes_ratio": round(row["sync_bytes"] / row["all_reduce_bytes"], 4),
        "time_ratio": round(row["sync_ms"] / row["all_reduce_ms"], 4),
        "cpu_ratio": round(row["sync_cpu_ms"] / row["all_reduce_cpu_ms"], 4),
    }


def _train(group: TableGroup, ids: torch.Tensor) -> None:
    anchor = torch.empty(0, device=ids.device, requires_grad=True)
    offsets = torch.arange(ids.numel() + 1, device=ids.device)
    rate = torch.full((), 0.1, device=ids.device)
    out = group.train_lookup(anchor, ids, offsets, None, ids.numel(), False, rate)
    out.backward(torch.ones_like(out))


def _timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Returns milliseconds of wall time and processor time, on the slowest rank."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    dist.barrier()
    wait()
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    wait()
    passed = [1000 * (time.perf_counter() - begin), 1000 * (time.process_time() - cpu)]
    slowest = torch.tensor(passed, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return tuple(slowest.tolist())


if __name__ == "__main__":
    main()
