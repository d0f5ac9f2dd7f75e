"""Time of requests to a served model while it applies deltas, compared with the time without.

    python -m benchmarks serving_deltas --out benchmarks/results/serving_deltas.csv

A hash table with ``--rows`` rows of ``--dim`` columns is trained under
``DistributedModelParallel``, exported, and served in this process. One thread on one core
repeatedly calls the model with ``--ids`` ids, drawn by a power law, in bags of 20. The other core
applies ``--deltas`` deltas, each with ``--share`` of the rows, one at a time, in a thread of this
process or in another process (``follow(process=True)``). Requests that begin during a poll that
applies a delta are compared with as many requests before and after it. Times are microseconds per
request, ``apply_ms`` is the median time of a poll, and ``ratio`` the ratio of the 99th percentiles.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed
from benchmarks.ranks import joined_ranks
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    checkpoint,
    get_default_sharders,
    serving,
)

KEYS = ("case", "format", "rows", "dim", "ids", "share")
_BAG, _REQUESTS, _FILL = 20, 64, 1 << 16
_IDLE_SECONDS = 0.5


class Model(nn.Module):
    """Pooled rows and two layers."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=dim, num_embeddings=int(rows / 0.9), feature_names=["ids"]
        )
        self.ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values()).squeeze(1)


def _features(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["ids"], values=ids, lengths=torch.ones(ids.numel(), dtype=torch.int64)
    )


def sharded(args: argparse.Namespace) -> nn.Module:
    """The model with one hash table for ``args.rows`` rows of ``args.dim`` columns."""
    model = Model(args.rows, args.dim)
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})
    sharders = get_default_sharders()
    constraints = {"t": ParameterConstraints(compute_kernels=["hkv"])}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))


def write(args: argparse.Namespace, folder: Path) -> None:
    """Writes an exported model, and a chain of deltas after it. Folder ``newest`` gets the chain's
    file ``deltas.json`` after each delta."""
    model = sharded(args)
    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    writer = checkpoint.DeltaWriter(model, folder / "written", states=False)

    def train(rows: Tensor) -> None:
        for part in rows.split(_FILL):
            optimizer.zero_grad()
            model(_features(hashed(part))).mean().backward()
            optimizer.step()

    (folder / "newest").mkdir()
    generator = torch.Generator().manual_seed(1)
    changed = max(1, int(args.share * args.rows))
    train(torch.arange(args.rows))
    for number in range(args.deltas + 1):
        if number:
            train(torch.randperm(args.rows, generator=generator)[:changed])
        writer.write()
        shutil.copy(folder / "written" / "deltas.json", folder / "newest" / str(number))
        if number == 0:
            inputs = (_features(torch.arange(2)),)
            given = {"inputs": inputs, "deltas": folder / "written"}
            serving.export(model, folder / "model", args.format, **given)


def show(folder: Path, chain: Path, number: int) -> None:
    """Adds a checkpoint of the written chain to another folder, like its writer."""
    name = f"delta-{number:06d}" if number else "base-000000"
    (chain / name).symlink_to(folder / "written" / name)
    shutil.copy(folder / "newest" / str(number), chain / "part")
    (chain / "part").rename(chain / "deltas.json")


def requests_of(args: argparse.Namespace) -> list[serving.KeyedIds]:
    """Creates requests with ids of the table."""
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(args.rows, generator=generator)
    lengths = torch.full((1, args.ids // _BAG), _BAG)
    requests = []
    for _ in range(_REQUESTS):
        unit = torch.rand(lengths.numel() * _BAG, generator=generator, dtype=torch.float64)
        ranks = (args.rows**unit - 1).long().clamp(0, args.rows - 1)
        requests.append(serving.KeyedIds(["ids"], hashed(order[ranks]), lengths))
    return requests


class Applier:
    """Polls on another core on request.

    Args:
        model: the model that follows the chain.
        chain: folder of the chain.
        process: see ``serving.follow``.
        cores: cores that it may use, or None for any.
    """

    def __init__(
        self, model: serving.ServingModel, chain: Path, process: bool, cores: set[int] | None
    ) -> None:
        self._asked, self._done = threading.Event(), threading.Event()
        self._is_over = False
        self.seconds: list[float] = []

        def run() -> None:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            follower = serving.follow(model, chain, every=None, process=process)
            self._done.set()
            while True:
                self._asked.wait()
                self._asked.clear()
                if self._is_over:
                    return follower.stop()
                began = time.perf_counter()
                applied = follower.poll()
                self.seconds.append(time.perf_counter() - began)
                if applied != 1:
                    raise RuntimeError(f"{applied} deltas were applied: {follower.error}")
                self._done.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._done.wait()

    def poll(self) -> Callable[[], bool]:
        """Begins a poll; returns a function that returns whether the poll has ended."""
        self._done.clear()
        self._asked.set()
        return lambda: self._done.is_set() or not self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread."""
        self._is_over = True
        self._asked.set()
        self._thread.join()


def measured(args: argparse.Namespace, folder: Path, process: bool) -> dict[str, object]:
    """Times requests without and during polls that apply deltas."""
    chain = folder / f"chain-{process}"
    chain.mkdir()
    show(folder, chain, 0)
    model = serving.load(folder / "model", mapped=not args.resident)
    requests = requests_of(args)
    cores = sorted(os.sched_getaffinity(0))
    reader, others = {cores[0]}, set(cores[1:]) or None
    applier = Applier(model, chain, process, others)
    os.sched_setaffinity(0, reader)

    def times(is_over: Callable[[], bool]) -> list[float]:
        found, number = [], 0
        while not is_over():
            began = time.perf_counter()
            model(requests[number % _REQUESTS])
            found.append(1e6 * (time.perf_counter() - began))
            number += 1
        return found

    def for_seconds(seconds: float) -> Callable[[], bool]:
        ends = time.perf_counter() + seconds
        return lambda: time.perf_counter() > ends

    idle, applying = [], []
    times(for_seconds(_IDLE_SECONDS))
    for number in range(1, args.deltas + 1):
        idle += times(for_seconds(_IDLE_SECONDS))
        show(folder, chain, number)
        applying += times(applier.poll())
        idle += times(for_seconds(_IDLE_SECONDS))
    applier.stop()
    os.sched_setaffinity(0, set(cores))
    p99, idle_p99 = (statistics.quantiles(samples, n=100)[-1] for samples in (applying, idle))
    return {
        "case": "process" if process else "thread",
        "format": args.format,
        **{"rows": args.rows, "dim": args.dim, "ids": args.ids, "share": args.share},
        "deltas": args.deltas,
        "requests": len(applying),
        "idle_us": round(statistics.median(idle), 1),
        "idle_p99_us": round(idle_p99, 1),
        "applying_us": round(statistics.median(applying), 1),
        "applying_p99_us": round(p99, 1),
        "applying_max_us": round(max(applying), 1),
        "ratio": round(p99 / idle_p99, 3),
        "apply_ms": round(1e3 * statistics.median(applier.seconds), 1),
    }


def cases(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields the rows of the benchmark."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        with joined_ranks(torch.device("cpu")):
            write(args, folder)
        for case in args.cases:
            yield measured(args, folder, case == "process")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=AtLeast(1), default=1_000_000)
    add("--dim", type=AtLeast(1), default=128)
    add("--ids", type=AtLeast(1), default=2000, help="of a request (default: 2000)")
    add("--share", type=float, default=0.01, help="of the rows, in a delta (default: 0.01)")
    add("--deltas", type=AtLeast(1), default=10)
    add("--format", choices=("fp32", "fp16", "bf16", "int8", "int4"), default="fp32")
    add("--resident", action="store_true", help="tables in memory of the process, not mapped")
    both = ("thread", "process")
    add("--cases", nargs="+", choices=both, default=both, help="what applies (default: both)")
    add("--folder", type=Path, default=None, help="for files (default: the system's)")
    add("--out", type=Path, default=None, help="CSV file; keeps rows of other runs")
    args = parser.parse_args(arguments)
    if args.rows < 1 or args.dim < 1 or args.ids < _BAG or args.deltas < 1:
        parser.error(f"--rows, --dim and --deltas must be at least 1, and --ids at least {_BAG}")
    if not 0 < args.share <= 1:
        parser.error(f"--share is {args.share}, but must be above 0 and at most 1")
    torch.set_num_threads(1)
    report(cases(args), args.out, KEYS)


if __name__ == "__main__":
    main()
