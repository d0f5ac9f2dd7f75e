"""Processor time of the host in a sharded step, by part: hash tables and TorchRec's tables.

    python -m benchmarks host_time
    torchrun --nproc_per_node 2 -m benchmarks.host_time --out benchmarks/results/host_time.csv

``DistributedModelParallel`` has one collection of 26 tables, once with TorchRec's sharder and
``fused`` kernels and once with this package's sharder and ``hkv``, on the same ids in one run.
Batches and rows are small, so the time is mostly that of Python, the dispatcher and launches. The
parts of a step:

- ``input_dist``: the exchange of ids, until they have arrived;
- ``lookup``: the rest of the forward, to the pooled output;
- ``backward``: the backward with the update;
- ``step``: the whole step, ``model(batch).values().backward(grad)``.

``*_us`` is the processor time of all threads of the process per step, and ``*_main_us`` that of the
calling thread. Both are medians over rounds that alternate between the sides, on the slowest rank.
With gloo, waiting for other ranks costs no processor time. A GPU is only synchronized between
rounds, outside of the measured time. On a CPU, the kernels run in the calling thread and are part
of the figures. They matter less for smaller batches, so compare the smallest ``--batches`` with
larger ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.arguments import AtLeast
from benchmarks.ranks import device_of_rank, joined_ranks, report_once
from benchmarks.sharded_step import SIDES, draw, make_model

BATCHES = 4
PARTS = ("input_dist", "lookup", "backward", "step")
KEYS = ("what", "sharding", "ranks", "tables", "dim", "batch", "bag")


class Clocks:
    """Processor time of the calling thread and of the process, by part."""

    def __init__(self) -> None:
        self.main = dict.fromkeys(PARTS, 0.0)
        self.all = dict.fromkeys(PARTS, 0.0)
        self._last = (0.0, 0.0)

    def start(self) -> None:
        """Begins a part."""
        self._last = (time.thread_time(), time.process_time())

    def stop(self, part: str) -> None:
        """Ends a part and begins the next."""
        now = (time.thread_time(), time.process_time())
        self.main[part] += now[0] - self._last[0]
        self.all[part] += now[1] - self._last[1]
        self._last = now


Step = Callable[[DistributedModelParallel, KeyedJaggedTensor, Tensor, Clocks], None]


def parts_of_step(
    model: DistributedModelParallel, batch: KeyedJaggedTensor, grad: Tensor, clocks: Clocks
) -> None:
    """Runs one step, part by part."""
    sharded = model.module
    clocks.start()
    context = sharded.create_context()
    arrived = sharded.input_dist(context, batch).wait().wait()
    clocks.stop("input_dist")
    output = sharded.compute_and_output_dist(context, arrived).wait().values()
    clocks.stop("lookup")
    output.backward(grad)
    clocks.stop("backward")


def whole_step(
    model: DistributedModelParallel, batch: KeyedJaggedTensor, grad: Tensor, clocks: Clocks
) -> None:
    """Runs one step as in user code."""
    clocks.start()
    model(batch).values().backward(grad)
    clocks.stop("step")


def round_of(
    args: argparse.Namespace,
    model: DistributedModelParallel,
    batches: list[KeyedJaggedTensor],
    grad: Tensor,
) -> Clocks:
    """Returns the clocks of a round: steps part by part, and as many whole steps."""
    clocks = Clocks()
    steps: tuple[Step, ...] = (parts_of_step, whole_step)
    for step in steps:
        synchronize(args.device)
        dist.barrier()
        for at in range(args.steps):
            step(model, batches[at % len(batches)], grad, clocks)
        synchronize(args.device)
    return clocks


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields a row per part and batch size."""
    torch.manual_seed(1 + dist.get_rank())
    models = {side: make_model(args, side, args.sharding) for side in SIDES}
    for batch in args.batches:
        args.batch = batch
        batches = [draw(args, 0.0) for _ in range(BATCHES)]
        grad = torch.randn(batch, args.tables * args.dim, device=args.device)
        for model in models.values():  # warms up
            round_of(args, model, batches, grad)
        rounds: dict[str, list[Clocks]] = {side: [] for side in SIDES}
        for _ in range(args.rounds):
            for side, model in models.items():
                rounds[side].append(round_of(args, model, batches, grad))
        yield from rows_of(args, rounds)


def rows_of(
    args: argparse.Namespace, rounds: dict[str, list[Clocks]]
) -> Iterator[dict[str, object]]:
    """Yields the medians of all rounds, on the slowest rank."""

    def median(side: str, which: str, part: str) -> float:
        return statistics.median(
            1e6 * getattr(clocks, which)[part] / args.steps for clocks in rounds[side]
        )

    for part in PARTS:
        figures = torch.tensor(
            [median(side, which, part) for which in ("all", "main") for side in SIDES],
            dtype=torch.float64,
            device=args.device,
        )
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        stock, hkv, stock_main, hkv_main = figures.tolist()
        yield {
            "what": part,
            "sharding": args.sharding,
            "ranks": dist.get_world_size(),
            "tables": args.tables,
            "dim": args.dim,
            "batch": args.batch,
            "bag": args.bag,
            "stock_us": round(stock),
            "hkv_us": round(hkv),
            "ratio": round(hkv / stock, 3),
            "stock_main_us": round(stock_main),
            "hkv_main_us": round(hkv_main),
            "main_ratio": round(hkv_main / stock_main, 3),
            "torchrec": torchrec.__version__,
        }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=AtLeast(1), default=26)
    parser.add_argument("--rows", type=AtLeast(1), default=2000, help="ids a table")
    parser.add_argument("--dim", type=AtLeast(1), default=8)
    parser.add_argument(
        "--batches", type=AtLeast(1), nargs="+", default=[8, 64, 512], help="of a rank"
    )
    parser.add_argument("--bag", type=AtLeast(1), default=2, help="ids of a bag")
    parser.add_argument("--sharding", choices=("row_wise", "table_wise"), default="row_wise")
    parser.add_argument("--steps", type=AtLeast(1), default=50, help="of a round")
    parser.add_argument("--rounds", type=AtLeast(1), default=7, help="of each side")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    args.device = device_of_rank(args.device)
    args.load, args.num_groups, args.wire_dtype = 0.5, 1, "fp32"
    torch.set_num_threads(1)
    with joined_ranks(args.device, minutes=2):
        report_once(compare(args), args.out, KEYS)


if __name__ == "__main__":
    main()
