"""A step of row-wise sharded tables on several ranks: hash tables and TorchRec's tables.

    torchrun --nproc_per_node 2 -m benchmarks.sharded_step --out benchmarks/results/sharded_step.csv

``DistributedModelParallel`` has one collection of the tables S1, once with TorchRec's sharder and
``fused`` kernels and once with this package's sharder and ``hkv``, row-wise sharded, with row-wise
Adagrad, in one run on the same ids. The hash tables hold all ids at a load factor of ``--load``,
and exchange them in ``--num-groups`` groups. There are separate rows for

- ``step``: exchange of ids, lookup, exchange of pooled rows, and the backward with the update;
- ``input_dist``: only the exchange of ids, until they have arrived.

Both sides run in turn, in rounds of back-to-back calls. ``stock_ms`` and ``hkv_ms`` are medians
over all calls of all rounds, on the slowest rank: between events on a GPU, wall time on a CPU.
``ratio`` is ``hkv_ms / stock_ms``. Samples are those of all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fbgemm_gpu
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.arguments import AtLeast
from benchmarks.ids import power_law
from benchmarks.ranks import device_of_rank, joined_ranks, report_once
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    get_default_sharders,
)
from torchrec_hkv.sharding import table_counters

#: Name, and exponent of the ids' power law (0: uniform).
STREAMS = {"uniform": 0.0, "power_law": 1.05}
SIDES = ("stock", "hkv")
BATCHES = 4
#: Coprime to the numbers of rows, so that frequent ids are spread over the table.
_PRIME = 2654435761
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = (
    "what",
    "stream",
    "ranks",
    "tables",
    "rows",
    "dim",
    "batch",
    "bag",
    "load",
    "num_groups",
    "wire_dtype",
)


def stock_sharder(wire_dtype: str) -> EmbeddingBagCollectionSharder:
    """Creates TorchRec's sharder, which exchanges pooled rows in this dtype."""
    precision = CommType(wire_dtype)
    config = QCommsConfig(forward_precision=precision, backward_precision=precision)
    return EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=None if wire_dtype == "fp32" else get_qcomm_codecs_registry(config)
    )


def make_model(
    args: argparse.Namespace, side: str, sharding: str = "row_wise"
) -> DistributedModelParallel:
    """Creates the sharded tables of one side."""
    kernel = "fused" if side == "stock" else "hkv"
    tables = [
        EmbeddingBagConfig(
            name=f"t{t}",
            feature_names=[f"f{t}"],
            embedding_dim=args.dim,
            num_embeddings=args.rows if side == "stock" else round(args.rows / args.load),
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        for t in range(args.tables)
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01, "eps": 1e-8})
    world_size = dist.get_world_size()
    topology = Topology(
        world_size=world_size,
        local_world_size=world_size,
        compute_device=args.device.type,
        hbm_cap=1 << 40,  # the planner must not check memory
        ddr_cap=1 << 42,
    )
    constraint = ParameterConstraints(compute_kernels=[kernel], sharding_types=[sharding])
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints={table.name: constraint for table in tables}
    )
    sharders = get_default_sharders(num_groups=args.num_groups, wire_dtype=args.wire_dtype)
    plan = planner.collective_plan(collection, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        collection,
        device=args.device,
        plan=plan,
        sharders=[stock_sharder(args.wire_dtype)] if side == "stock" else sharders,
    )


def keyed(args: argparse.Namespace, ids: Tensor) -> KeyedJaggedTensor:
    """Creates a batch of bags of equal length, from the ids of one table after the other."""
    return KeyedJaggedTensor(
        keys=[f"f{t}" for t in range(args.tables)],
        values=ids,
        lengths=torch.full((args.tables * args.batch,), args.bag, device=args.device),
    )


def draw(args: argparse.Namespace, power: float) -> KeyedJaggedTensor:
    """Draws a batch of a stream."""
    count = args.tables * args.batch * args.bag
    if not power:
        return keyed(args, torch.randint(args.rows, (count,), device=args.device))
    ranked = power_law(count, args.rows, power, args.device).view(args.tables, -1)
    # Each table has different frequent ids, so that they are distributed over the ranks.
    first = torch.arange(args.tables, device=args.device)[:, None] * (args.rows // args.tables)
    return keyed(args, ((ranked * _PRIME + first) % args.rows).flatten())


def fill(args: argparse.Namespace, model: DistributedModelParallel) -> None:
    """Looks up every id once, each rank a part of the ids, so that the hash tables hold all ids."""
    world_size, count = dist.get_world_size(), args.batch * args.bag
    for first in range(0, args.rows, count * world_size):
        ids = (
            first + dist.get_rank() * count + torch.arange(count, device=args.device)
        ) % args.rows
        model(keyed(args, ids.repeat(args.tables))).wait()
    sizes = [counted["size"] for counted in table_counters(model).values()]
    table_sizes = torch.tensor(sizes, device=args.device)
    dist.all_reduce(table_sizes)
    if table_sizes.tolist() != [args.rows] * args.tables:
        raise RuntimeError("a table has no room for an id; --load must be lower.")


def round_ms(call: Callable[[int], object], steps: int, device: torch.device) -> list[float]:
    """Waits for all ranks; returns milliseconds of each of ``steps`` back-to-back calls."""

    def now() -> float | torch.cuda.Event:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    marks = [now()]
    for at in range(steps):
        call(at)
        marks.append(now())
    pairs = itertools.pairwise(marks)
    if device.type != "cuda":
        return [1e3 * (end - begin) for begin, end in pairs]
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairs]


def step_of(
    model: DistributedModelParallel, batches: list[KeyedJaggedTensor], grad: Tensor
) -> Callable[[int], object]:
    """Creates a call for a whole step."""
    return lambda at: model(batches[at % BATCHES]).values().backward(grad)


def exchange_of(
    model: DistributedModelParallel, batches: list[KeyedJaggedTensor]
) -> Callable[[int], object]:
    """Creates a call for the exchange of ids."""
    sharded = model.module
    return lambda at: (
        sharded.input_dist(sharded.create_context(), batches[at % BATCHES]).wait().wait()
    )


def compare(
    args: argparse.Namespace, calls: dict[str, Callable[[int], object]]
) -> dict[str, float]:
    """Returns the median milliseconds of a call for both sides, on the slowest rank."""
    for call in calls.values():
        round_ms(call, args.warm_up, args.device)
    times: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(args.rounds):
        for side, call in calls.items():
            times[side] += round_ms(call, args.steps, args.device)
    medians = torch.tensor(
        [statistics.median(times[side]) for side in SIDES], dtype=torch.float64, device=args.device
    )
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(SIDES, medians.tolist(), strict=True))


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields two rows per stream."""
    torch.manual_seed(1 + dist.get_rank())
    models = {side: make_model(args, side) for side in SIDES}
    fill(args, models["hkv"])
    grad = torch.randn(args.batch, args.tables * args.dim, device=args.device)
    ranks = dist.get_world_size()
    for name in args.streams:
        batches = [draw(args, STREAMS[name]) for _ in range(BATCHES)]

        steps = {side: step_of(model, batches, grad) for side, model in models.items()}
        exchanges = {side: exchange_of(model, batches) for side, model in models.items()}
        for what, calls in (("step", steps), ("input_dist", exchanges)):
            times = compare(args, calls)
            yield {
                "what": what,
                "stream": name,
                "ranks": ranks,
                "tables": args.tables,
                "rows": args.rows,
                "dim": args.dim,
                "batch": args.batch,
                "bag": args.bag,
                "load": args.load,
                "num_groups": args.num_groups,
                "wire_dtype": args.wire_dtype,
                **{f"{side}_ms": round(ms, 3) for side, ms in times.items()},
                "ratio": round(times["hkv"] / times["stock"], 3),
                **{
                    f"{side}_samples_s": round(1e3 * args.batch * ranks / ms)
                    for side, ms in times.items()
                },
                "fbgemm_gpu": fbgemm_gpu.__version__,
                "torchrec": torchrec.__version__,
            }
        if args.profile is not None:
            for side, step in steps.items():
                profile(args.profile / f"{name}_{side}.txt", step, args.device)


def profile(path: Path, call: Callable[[int], object], device: torch.device) -> None:
    """Writes a profile of the device's kernels in five calls, on rank 0."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    first = dist.get_rank() == 0
    with torch.profiler.profile(activities=kinds) if first else contextlib.nullcontext() as seen:
        round_ms(call, 5, device)
    if seen is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        order = f"self_{device.type}_time_total"
        path.write_text(seen.key_averages().table(sort_by=order, row_limit=60))


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=AtLeast(1), default=26)
    parser.add_argument(
        "--rows", type=AtLeast(1), help="ids a table (default: 1M on a GPU, 20,000)"
    )
    parser.add_argument("--dim", type=AtLeast(1), default=128)
    parser.add_argument("--batch", type=AtLeast(1), help="of a rank (default: 8192 on a GPU, 256)")
    parser.add_argument("--bag", type=AtLeast(1), default=10, help="ids of a bag")
    parser.add_argument("--load", type=float, default=0.8, help="load factor of the hash tables")
    parser.add_argument(
        "--num-groups", type=AtLeast(1), default=1, help="exchange groups of the hash tables"
    )
    parser.add_argument(
        "--wire-dtype",
        choices=["fp32", "fp16", "bf16"],
        default="fp32",
        help="of pooled rows and their gradients between ranks, on both sides",
    )
    parser.add_argument("--streams", nargs="+", choices=list(STREAMS), default=list(STREAMS))
    parser.add_argument("--steps", type=AtLeast(1), default=40, help="of a round")
    parser.add_argument("--rounds", type=AtLeast(1), default=5, help="of each side")
    parser.add_argument(
        "--warm-up", type=AtLeast(0), default=5, help="calls before the first round"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write kernels' times here")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    args.device = device_of_rank(args.device)
    on_gpu = args.device.type == "cuda"
    args.rows = args.rows or (1_000_000 if on_gpu else 20_000)
    args.batch = args.batch or (8192 if on_gpu else 256)
    with joined_ranks(args.device, minutes=2):
        report_once(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
