"""What the planner says that a step takes, and what a sharded step then takes.

    torchrec-hkv calibrate && python -m benchmarks.planner --out benchmarks/results/planner.csv
    torchrun --nproc_per_node 2 -m benchmarks.planner --out benchmarks/results/planner_2.csv

Tables of one kernel are planned and sharded, and the parts of their steps are timed: lookup and
backward, which the planner knows from measured constants, and the exchanges, of which it knows what
they take without ids and a bandwidth. The backward is timed with the exchange of its gradients.
Times are of rank 0: on a GPU the medians of the device's, on a CPU the least (with one thread on
one rank of processor time). Bytes are the tables' own counts, and on a GPU what PyTorch's allocator
gave, in all and at the peak of a step. Ratios are of what was predicted to what was measured. At
the end it says how many steps were within 25 % and how many tables' bytes within 5 %.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.ids import power_law
from benchmarks.ranks import device_of_rank, joined_ranks, report_once
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.planner import IdFrequencies
from torchrec_hkv.planner.report import ReportedModulePlan

PARTS = ("input_dist", "forward", "output_dist", "backward")
WARM_UP = 5
#: Ids of a bag of the batches that fill hash tables.
FILL_BAG = 64
#: Names, ids of a bag, and the power of the law that ids follow (0: all alike).
STREAMS = (("uniform_1", 1, 0.0), ("uniform_8", 8, 0.0), ("power_law_8", 8, 1.05))
HIDING_CYCLES = 10_000_000


def draw(count: int, rows: int, power: float, device: torch.device) -> Tensor:
    """Ids of a stream."""
    if power:
        return power_law(count, rows, power, device)
    return torch.randint(rows, (count,), device=device)


@functools.cache
def frequencies(rows: int, power: float) -> IdFrequencies:
    """Of a sample of a stream."""
    return IdFrequencies.of_ids(draw(min(1 << 24, 20 * rows), rows, power, torch.device("cpu")))


def plan_and_shard(
    args: argparse.Namespace, kernel: str, dim: int, stream: tuple[str, int, float]
) -> tuple[DistributedModelParallel, ReportedModulePlan]:
    """A collection of tables on one kernel."""
    _, bag, power = stream
    device = args.device
    tables = [
        EmbeddingBagConfig(
            name=f"t{t}",
            feature_names=[f"f{t}"],
            embedding_dim=dim,
            # Room for all ids in a hash table.
            num_embeddings=args.rows if kernel != "hkv" else round(args.rows / 0.8),
            weight_init_min=-0.01,
            weight_init_max=0.01,
        )
        for t in range(args.tables)
    ]
    model = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 1e-3})
    constraint = ParameterConstraints(
        compute_kernels=[kernel],
        sharding_types=["table_wise" if kernel == "tt" else args.sharding_type],
        pooling_factors=[float(bag)],
        options=TTOptions(ranks=args.tt_rank) if kernel == "tt" else None,
        frequencies=frequencies(args.rows, power) if power else None,
    )
    sharders = get_default_sharders()
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, compute_device=device.type)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=args.batch,
        constraints={table.name: constraint for table in tables},
        calibration=args.calibration,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    return sharded, plan.plan[""]


def keyed(args: argparse.Namespace, ids: list[Tensor], bag: int) -> KeyedJaggedTensor:
    """A batch of bags of equal length."""
    values = torch.cat(ids)
    return KeyedJaggedTensor(
        keys=[f"f{t}" for t in range(args.tables)],
        values=values,
        lengths=torch.full((values.numel() // bag,), bag, device=args.device),
    )


class Clock:
    """Marks between parts of a step; milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        # Processor time does not see a wait for other ranks.
        alone = torch.get_num_threads() == 1 and dist.get_world_size() == 1
        self._now = time.process_time if alone else time.perf_counter

    def begin(self) -> None:
        """Waits for the device, and hides what the host does from here on."""
        self._marks = []
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(HIDING_CYCLES)
        if dist.get_world_size() > 1:
            # All ranks begin together, on a GPU as the device sees it: else the one that is ahead
            # would wait in the exchange.
            dist.all_reduce(torch.ones(1, device=self._device))
        self.mark()

    def mark(self) -> None:
        """The end of a part."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._now())

    def between(self) -> list[float]:
        """Milliseconds of the parts."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            self._marks[-1].synchronize()
            return [begin.elapsed_time(end) for begin, end in pairs]
        return [1e3 * (end - begin) for begin, end in pairs]


def step(module: Any, features: KeyedJaggedTensor, clock: Clock) -> list[float]:
    """One step, part by part."""
    context = module.create_context()
    clock.begin()
    received = module.input_dist(context, features).wait().wait()
    clock.mark()
    (exchange,) = clock.between()
    clock.begin()  # the exchange has waited for the device
    rows = module.compute(context, received)
    clock.mark()
    pooled = module.output_dist(context, rows).wait().values()
    clock.mark()
    pooled.backward(torch.ones_like(pooled))
    clock.mark()
    return [exchange, *clock.between()]


def fill(module: Any, args: argparse.Namespace) -> None:
    """Asks for every id once, each rank for a part of them, so that hash tables hold it."""
    count = args.batch * FILL_BAG
    own = dist.get_rank() * count + torch.arange(count, device=args.device)
    for first in range(0, args.rows, count * dist.get_world_size()):
        ids = (first + own) % args.rows
        pooled = module(keyed(args, [ids] * args.tables, FILL_BAG)).values()
        pooled.backward(torch.zeros_like(pooled))


def table_bytes(module: Any, kernel: str) -> int:
    """What the tables of this rank say that they take."""
    if kernel != "fused":
        lookups = module.group_lookups()
        memory = [lookup.memory(key) for key, lookup in lookups.items()]
        return sum(part.hbm + part.host for part in memory)
    state = list(module.state_dict().values())
    states = [
        tensor
        for entry in module.fused_optimizer.state_dict()["state"].values()
        for tensor in entry.values()
    ]
    return sum(local_bytes(tensor) for tensor in [*state, *states])


def local_bytes(tensor: Any) -> int:
    """Of a tensor's part on this rank."""
    parts = tensor.local_shards() if hasattr(tensor, "local_shards") else []
    tensors = [part.tensor for part in parts] if parts else [tensor]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row a kernel, dim and stream."""
    rank, on_gpu = dist.get_rank(), args.device.type == "cuda"
    typical: Callable[[list[float]], float] = statistics.median if on_gpu else min
    for kernel in args.kernels:
        for dim in args.dims:
            for stream in STREAMS:
                name, bag, power = stream
                before = torch.cuda.memory_allocated() if on_gpu else 0
                model, plan = plan_and_shard(args, kernel, dim, stream)
                module = model.module
                if kernel == "hkv":
                    fill(module, args)
                clock, times = Clock(args.device), []
                for turn in range(args.steps + WARM_UP):
                    if turn == WARM_UP and on_gpu:
                        torch.cuda.reset_peak_memory_stats()
                    count = args.batch * bag
                    ids = [draw(count, args.rows, power, args.device) for _ in range(args.tables)]
                    took = step(module, keyed(args, ids, bag), clock)
                    if turn >= WARM_UP:
                        times.append(took)
                row: dict[str, object] = {
                    "kernel": kernel,
                    "sharding": next(iter(plan.reports.values())).sharding_type,
                    "ranks": dist.get_world_size(),
                    "tables": args.tables,
                    "rows": args.rows,
                    "dim": dim,
                    "batch": args.batch,
                    "stream": name,
                    "threads": torch.get_num_threads(),
                }
                measured = dict(zip(PARTS, map(typical, zip(*times, strict=True)), strict=True))
                said = plan.step_times(rank)
                for part in PARTS:
                    row[f"{part}_predicted_ms"] = round(said[part], 4)
                    row[f"{part}_ms"] = round(measured[part], 4)
                for part in ("forward", "backward"):
                    row[f"{part}_ratio"] = round(said[part] / measured[part], 3)
                row["step_ratio"] = round(sum(said.values()) / sum(measured.values()), 3)
                row["table_bytes_predicted"] = sum(
                    part.hbm + part.host
                    for table in plan.reports.values()
                    for owner, part in zip(table.ranks, table.bytes, strict=True)
                    if owner == rank
                )
                row["table_bytes"] = table_bytes(module, kernel)
                row["bytes_ratio"] = round(row["table_bytes_predicted"] / row["table_bytes"], 4)
                row["allocated_bytes"] = torch.cuda.memory_allocated() - before if on_gpu else ""
                row["peak_bytes"] = torch.cuda.max_memory_allocated() - before if on_gpu else ""
                yield row
                del model, module


def summed_up(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, and at the end, of rank 0, a line that says how many were predicted well."""
    ratios: list[tuple[float, float]] = []
    for row in rows:
        ratios.append((row["step_ratio"], row["bytes_ratio"]))
        yield row
    steps = sum(abs(step - 1) <= 0.25 for step, _ in ratios)
    tables = sum(abs(held - 1) <= 0.05 for _, held in ratios)
    if dist.get_rank() == 0:
        print(f"of {len(ratios)} rows: steps within 25 %: {steps}, bytes within 5 %: {tables}")


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=["fused", "hkv", "tt"])
    parser.add_argument("--sharding-type", default="row_wise")
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, help="ids a table (default: 10M on a GPU, 200,000)")
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--batch", type=int, help="of a rank (default: 8192 on a GPU, 1024)")
    parser.add_argument("--steps", type=int, default=21, help="timed steps a row")
    parser.add_argument("--tt-rank", type=int, default=32)
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--calibration", type=Path, help="(default: where planners look)")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    args.device = device_of_rank(args.device)
    on_gpu = args.device.type == "cuda"
    args.rows = args.rows or (10_000_000 if on_gpu else 200_000)
    args.batch = args.batch or (8192 if on_gpu else 1024)
    if args.threads:
        torch.set_num_threads(args.threads)
    with joined_ranks(args.device, minutes=5):
        report_once(summed_up(measure(args)), args.out)


if __name__ == "__main__":
    main()
