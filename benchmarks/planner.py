"""The planner's predictions of steps and memory, compared with measurements of sharded steps.

    torchrec-hkv calibrate && python -m benchmarks.planner --out benchmarks/results/planner.csv
    torchrun --nproc_per_node 2 -m benchmarks.planner --out benchmarks/results/planner_2.csv

Tables of one kernel are planned and sharded, and the parts of their steps are timed: lookup and
backward, which the planner predicts from measured constants, and the exchanges, which it predicts
from their latency without ids and a bandwidth. The time of the backward includes the exchange of
its gradients. All tables exist at once (60 GB by default on one GPU), and all cases take turns of a
few steps, because much of a step is the host's time, whose speed drifts. Times are of rank 0:
medians of the device's time on a GPU, minima on a CPU (of processor time for one thread on one
rank), and also quartiles for whole steps. Bytes are the tables' own counts, and on a GPU those of
PyTorch's allocator, in total and at the peak of a step. Ratios are predicted / measured. The last
line has the numbers of steps within 25 % and of tables' bytes within 5 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
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
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.arguments import AtLeast
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
#: Number of timed steps per turn, and of warm-up steps before them.
TURN, AGAIN_WARM = 5, 2
#: Pooling factor of the batches that fill hash tables.
FILL_BAG = 64
#: Name, pooling factor, and exponent of the ids' power law (0: uniform).
STREAMS = (("uniform_1", 1, 0.0), ("uniform_8", 8, 0.0), ("power_law_8", 8, 1.05))
HIDING_CYCLES = 10_000_000
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("kernel", "sharding", "ranks", "tables", "rows", "dim", "batch", "stream", "threads")


def draw(count: int, rows: int, power: float, device: torch.device) -> Tensor:
    """Draws ids of a stream."""
    if power:
        return power_law(count, rows, power, device)
    return torch.randint(rows, (count,), device=device)


@functools.cache
def frequencies(rows: int, power: float) -> IdFrequencies:
    """Returns the frequencies in a sample of a stream."""
    return IdFrequencies.of_ids(draw(min(1 << 24, 20 * rows), rows, power, torch.device("cpu")))


def make_collection(args: argparse.Namespace, kernel: str, dim: int) -> EmbeddingBagCollection:
    """Creates tables for one kernel."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{t}",
            feature_names=[f"f{t}"],
            embedding_dim=dim,
            # A hash table gets room for all ids.
            num_embeddings=args.rows if kernel != "hkv" else round(args.rows / 0.8),
            weight_init_min=-0.01,
            weight_init_max=0.01,
        )
        for t in range(args.tables)
    ]
    model = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 1e-3})
    return model


def plan_for(
    args: argparse.Namespace,
    model: EmbeddingBagCollection,
    kernel: str,
    stream: tuple[str, int, float],
) -> ShardingPlan:
    """Plans the tables for a stream, with the planner's predictions."""
    _, bag, power = stream
    constraint = ParameterConstraints(
        compute_kernels=[kernel],
        sharding_types=["table_wise" if kernel == "tt" else args.sharding_type],
        pooling_factors=[float(bag)],
        options=TTOptions(ranks=args.tt_rank) if kernel == "tt" else None,
        frequencies=frequencies(args.rows, power) if power else None,
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=args.device.type),
        batch_size=args.batch,
        constraints={config.name: constraint for config in model.embedding_bag_configs()},
        calibration=args.calibration,
    )
    return planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)


def keyed(args: argparse.Namespace, ids: list[Tensor], bag: int) -> KeyedJaggedTensor:
    """Creates a batch of bags of equal length."""
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
        # Processor time does not include waits for other ranks.
        alone = torch.get_num_threads() == 1 and dist.get_world_size() == 1
        self._now = time.process_time if alone else time.perf_counter

    def begin(self) -> None:
        """Waits for the device, and hides the host's next work."""
        self._marks = []
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(HIDING_CYCLES)
        if dist.get_world_size() > 1:
            # All ranks begin together, on a GPU in device time. Otherwise a rank that is ahead
            # would wait in the exchange.
            dist.all_reduce(torch.ones(1, device=self._device))
        self.mark()

    def mark(self) -> None:
        """Marks the end of a part."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._now())

    def between(self) -> list[float]:
        """Returns milliseconds of the parts."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            self._marks[-1].synchronize()
            return [begin.elapsed_time(end) for begin, end in pairs]
        return [1e3 * (end - begin) for begin, end in pairs]


def step(module: Any, features: KeyedJaggedTensor, clock: Clock) -> list[float]:
    """Runs one step, part by part."""
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
    """Looks up every id once, each rank a part of the ids, so that hash tables hold all ids."""
    count = args.batch * FILL_BAG
    rank_ids = dist.get_rank() * count + torch.arange(count, device=args.device)
    for first in range(0, args.rows, count * dist.get_world_size()):
        ids = (first + rank_ids) % args.rows
        pooled = module(keyed(args, [ids] * args.tables, FILL_BAG)).values()
        pooled.backward(torch.zeros_like(pooled))


def table_bytes(module: Any, kernel: str) -> int:
    """Returns the tables' own counts of their bytes on this rank."""
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
    """Returns the bytes of a tensor's part on this rank."""
    parts = tensor.local_shards() if hasattr(tensor, "local_shards") else []
    tensors = [part.tensor for part in parts] if parts else [tensor]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


@dataclasses.dataclass
class Case:
    """A case, which becomes a row.

    Attributes:
        kernel: kernel of the tables.
        dim: number of their columns.
        stream: stream of ids, one of :data:`STREAMS`.
        plan: sharding plan for this stream.
        module: the sharded tables.
        allocated: bytes that PyTorch's allocator allocated for the tables.
        times: times of the parts of each step.
        peak: peak of the additional bytes of a step.
    """

    kernel: str
    dim: int
    stream: tuple[str, int, float]
    plan: ReportedModulePlan
    module: Any
    allocated: int
    times: list[list[float]] = dataclasses.field(default_factory=list)
    peak: int = 0


def make_cases(args: argparse.Namespace) -> list[Case]:
    """Plans all cases, shards the tables of each kernel and dim, and fills hash tables."""
    cases = []
    for kernel, dim in itertools.product(args.kernels, args.dims):
        model = make_collection(args, kernel, dim)
        plans = [plan_for(args, model, kernel, stream) for stream in STREAMS]
        before = allocated(args.device)
        module = DistributedModelParallel(
            model, device=args.device, plan=plans[0], sharders=get_default_sharders()
        ).module
        if kernel == "hkv":
            fill(module, args)
        added_bytes = allocated(args.device) - before
        cases += [
            Case(kernel, dim, stream, plan.plan[""], module, added_bytes)
            for stream, plan in zip(STREAMS, plans, strict=True)
        ]
    return cases


def allocated(device: torch.device) -> int:
    """Returns the bytes that PyTorch's allocator has allocated on a GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def take_turns(args: argparse.Namespace, cases: list[Case]) -> None:
    """Times some steps of each case, round by round."""
    for case in cases:
        run_steps(args, case, WARM_UP, are_timed=False)
    for first in range(0, args.steps, TURN):
        for case in cases:
            # Warms up, because another case's ids and code are in the caches.
            run_steps(args, case, AGAIN_WARM, are_timed=False)
            run_steps(args, case, min(TURN, args.steps - first), are_timed=True)


def run_steps(args: argparse.Namespace, case: Case, count: int, are_timed: bool) -> None:
    """Runs steps of a case one after the other, on the case's batches."""
    _, bag, power = case.stream
    on_gpu, clock = args.device.type == "cuda", Clock(args.device)
    for _ in range(count):
        drawn = args.batch * bag
        ids = [draw(drawn, args.rows, power, args.device) for _ in range(args.tables)]
        features, before = keyed(args, ids, bag), allocated(args.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = step(case.module, features, clock)
        if are_timed:
            case.times.append(times)
            if on_gpu:
                case.peak = max(case.peak, torch.cuda.max_memory_allocated() - before)


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per kernel, dim and stream."""
    on_gpu = args.device.type == "cuda"
    cases = make_cases(args)
    take_turns(args, cases)
    for case in cases:
        yield row_of(args, case, statistics.median if on_gpu else min)


def row_of(
    args: argparse.Namespace, case: Case, typical: Callable[[list[float]], float]
) -> dict[str, object]:
    """Returns the predictions and measurements of a case."""
    rank, on_gpu = dist.get_rank(), args.device.type == "cuda"
    row: dict[str, object] = {
        "kernel": case.kernel,
        "sharding": next(iter(case.plan.reports.values())).sharding_type,
        "ranks": dist.get_world_size(),
        "tables": args.tables,
        "rows": args.rows,
        "dim": case.dim,
        "batch": args.batch,
        "stream": case.stream[0],
        "threads": torch.get_num_threads(),
    }
    measured = dict(zip(PARTS, map(typical, zip(*case.times, strict=True)), strict=True))
    predicted = case.plan.step_times(rank)
    for part in PARTS:
        row[f"{part}_predicted_ms"] = round(predicted[part], 4)
        row[f"{part}_ms"] = round(measured[part], 4)
    for part in ("forward", "backward"):
        row[f"{part}_ratio"] = round(predicted[part] / measured[part], 3)
    row["step_ratio"] = round(sum(predicted.values()) / sum(measured.values()), 3)
    for name, of_four in (("q1", 0), ("q3", 2)):
        quartiles = statistics.quantiles(map(sum, case.times), n=4)
        row[f"step_{name}_ms"] = round(quartiles[of_four], 4)
    row["table_bytes_predicted"] = sum(
        part.hbm + part.host
        for table in case.plan.reports.values()
        for owner, part in zip(table.ranks, table.bytes, strict=True)
        if owner == rank
    )
    row["table_bytes"] = table_bytes(case.module, case.kernel)
    row["bytes_ratio"] = round(row["table_bytes_predicted"] / row["table_bytes"], 4)
    row["allocated_bytes"] = case.allocated if on_gpu else ""
    row["peak_bytes"] = case.allocated + case.peak if on_gpu else ""
    return row


def summary(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows. At the end, rank 0 prints how many predictions were close."""
    ratios: list[tuple[float, float]] = []
    for row in rows:
        ratios.append((row["step_ratio"], row["bytes_ratio"]))
        yield row
    steps = sum(abs(step - 1) <= 0.25 for step, _ in ratios)
    tables = sum(abs(memory_ratio - 1) <= 0.05 for _, memory_ratio in ratios)
    if dist.get_rank() == 0:
        print(f"of {len(ratios)} rows: steps within 25 %: {steps}, bytes within 5 %: {tables}")


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=["fused", "hkv", "tt"])
    parser.add_argument("--sharding-type", default="row_wise")
    parser.add_argument("--tables", type=AtLeast(1), default=4)
    parser.add_argument(
        "--rows", type=AtLeast(1), help="ids a table (default: 10M on a GPU, 200,000)"
    )
    parser.add_argument("--dims", type=AtLeast(1), nargs="+", default=[32, 128])
    parser.add_argument("--batch", type=AtLeast(1), help="of a rank (default: 8192 on a GPU, 1024)")
    parser.add_argument("--steps", type=AtLeast(1), default=21, help="timed steps a row")
    parser.add_argument("--tt-rank", type=AtLeast(1), default=32)
    parser.add_argument("--threads", type=AtLeast(1), help="of a CPU")
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
        report_once(summary(measure(args)), args.out, KEYS)


if __name__ == "__main__":
    main()
