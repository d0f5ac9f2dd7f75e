"""MLPerf's DLRM-DCNv2 in a train pipeline on one or several ranks: hash tables and stock tables.

    python -m benchmarks dlrm_dcnv2 --out benchmarks/results/dlrm_dcnv2.csv

TorchRec's ``DLRM_DCN`` with the 26 tables, multi-hot sizes and layers of MLPerf's benchmark runs
under ``DistributedModelParallel`` and ``TrainPipelineSparseDist``, with TorchRec's sharder and
``fused`` kernels, and with this package's sharder and ``hkv``. The tables use row-wise Adagrad; the
dense part uses Adagrad and TF32 matrix products. Both sides train on the same batches in turn, in
one run. Tables have at most ``--max-rows`` rows; the hash tables hold all rows from the start, at a
load factor of ``--load``. Batches are drawn uniformly, are in pinned host memory, and are copied by
the pipeline.

``*_ms`` is the time of back-to-back steps, per step. ``*_host_ms`` is the processor time of all
threads of the process per step, without the wait at the end of a round. Both are medians over
rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.arguments import AtLeast
from benchmarks.ranks import device_of_rank, joined_ranks, report_once
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.sharding import table_counters

SIDES = ("stock", "hkv")
#: Rows of each table, and ids of each bag, of MLPerf's DLRM-DCNv2.
ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956)
ROWS += (405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000)
ROWS += (590_152, 12_973, 108, 36)
BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DENSE_FEATURES = 13
BATCHES = 8
LEARNING_RATE = 0.005
KEYS = ("batch", "ranks", "max_rows", "dim", "sharding", "load")


def rows_of(args: argparse.Namespace) -> list[int]:
    """Rows of each table."""
    return [min(rows, args.max_rows) for rows in ROWS]


def make_model(
    args: argparse.Namespace, side: str
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Creates one side, and the optimizer of its dense part."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{t}",
            feature_names=[f"f{t}"],
            embedding_dim=args.dim,
            # Small hash tables get a capacity with which a bucket has room for all rows.
            num_embeddings=rows if side == "stock" else max(round(rows / args.load), 256),
        )
        for t, rows in enumerate(rows_of(args))
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(
        RowWiseAdagrad, collection.parameters(), {"lr": LEARNING_RATE, "eps": 1e-8}
    )
    model = DLRMTrain(
        DLRM_DCN(
            embedding_bag_collection=collection,
            dense_in_features=DENSE_FEATURES,
            dense_arch_layer_sizes=[*args.bottom, args.dim],
            over_arch_layer_sizes=[*args.top, 1],
            dcn_num_layers=args.cross_layers,
            dcn_low_rank_dim=args.cross_rank,
            dense_device=args.device,
        )
    )
    # The cross net has no device argument.
    model.model.inter_arch.to(args.device)
    kernel = "fused" if side == "stock" else "hkv"
    constraint = ParameterConstraints(compute_kernels=[kernel], sharding_types=[args.sharding])
    world_size = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=world_size,
            compute_device=args.device.type,
            hbm_cap=1 << 40,  # the planner must not check memory
            ddr_cap=1 << 42,
        ),
        constraints={table.name: constraint for table in tables},
    )
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(
        model,
        device=args.device,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder()] if side == "stock" else sharders,
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=LEARNING_RATE, eps=1e-8),
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def collection_of(model: nn.Module) -> nn.Module:
    """The sharded tables."""
    return model.module.model.sparse_arch.embedding_bag_collection


def fill(args: argparse.Namespace, model: DistributedModelParallel) -> None:
    """Looks up every row once, so that the hash tables hold all rows."""
    rows, samples, collection = rows_of(args), 64, collection_of(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chunk = 1 << 18
    for first in range(0, max(rows), chunk * ranks):
        begin = first + rank * chunk
        ids = [torch.arange(min(begin, n), min(begin + chunk, n), device=args.device) for n in rows]
        lengths = torch.zeros(len(rows), samples, dtype=torch.int64)
        for of_table, part in zip(lengths, ids, strict=True):
            of_table += len(part) // samples
            of_table[0] += len(part) % samples
        collection(
            KeyedJaggedTensor(
                keys=[f"f{t}" for t in range(len(rows))],
                values=torch.cat(ids),
                lengths=lengths.flatten().to(args.device),
                stride=samples,
            )
        ).wait()
    sizes = torch.tensor(
        [counted["size"] for counted in table_counters(model).values()], device=args.device
    )
    dist.all_reduce(sizes)
    if sizes.tolist() != rows:
        raise RuntimeError("a table has no room for an id; --load must be lower.")


def draw(args: argparse.Namespace, batch: int) -> Batch:
    """Draws a batch in host memory, pinned if there is a GPU."""
    ids = [
        torch.randint(rows, (batch * bag,)) for rows, bag in zip(rows_of(args), BAGS, strict=True)
    ]
    drawn = Batch(
        dense_features=torch.rand(batch, DENSE_FEATURES),
        sparse_features=KeyedJaggedTensor(
            keys=[f"f{t}" for t in range(len(BAGS))],
            values=torch.cat(ids),
            lengths=torch.tensor(BAGS, dtype=torch.int32).repeat_interleave(batch),
            stride=batch,
        ),
        labels=torch.randint(2, (batch,)),
    )
    return drawn.pin_memory() if args.device.type == "cuda" else drawn


class Trainer:
    """The pipeline of one side, and its batches."""

    def __init__(self, args: argparse.Namespace, side: str) -> None:
        """
        Args:
            args: arguments of the command.
            side: ``"stock"`` or ``"hkv"``.
        """
        self.model, optimizer = make_model(args, side)
        if side == "hkv":
            fill(args, self.model)
        self._device = args.device
        self._pipeline = TrainPipelineSparseDist(self.model, optimizer, args.device)
        self._batches: Iterator[Batch] = iter(())

    def feed(self, batches: Sequence[Batch]) -> None:
        """Sets the batches, which are repeated. Earlier batches that have already been copied are
        trained first."""
        self._batches = itertools.cycle(batches)

    def _next(self) -> Iterator[Batch]:
        while True:
            yield next(self._batches)

    def round(self, steps: int) -> tuple[float, float]:
        """Returns milliseconds per step of back-to-back steps, and of processor time."""
        batches = self._next()
        self._wait()
        dist.barrier()
        begin, host_begin = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._pipeline.progress(batches)
        host = time.process_time() - host_begin
        self._wait()
        return 1e3 * (time.perf_counter() - begin) / steps, 1e3 * host / steps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields a row per batch size."""
    torch.manual_seed(1 + dist.get_rank())
    trainers = {side: Trainer(args, side) for side in SIDES}
    for batch in args.batches:
        batches = [draw(args, batch) for _ in range(BATCHES)]
        for trainer in trainers.values():
            trainer.feed(batches)
            trainer.round(args.warm_up)
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for _ in range(args.rounds):
            for side, trainer in trainers.items():
                times[side].append(trainer.round(args.steps))
        figures = torch.tensor(
            [
                [statistics.median(column) for column in zip(*times[side], strict=True)]
                for side in SIDES
            ],
            dtype=torch.float64,
            device=args.device,
        )
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        (stock, stock_host), (hkv, hkv_host) = figures.tolist()
        yield {
            "batch": batch,
            "ranks": dist.get_world_size(),
            "max_rows": args.max_rows,
            "dim": args.dim,
            "sharding": args.sharding,
            "load": args.load,
            "stock_ms": round(stock, 3),
            "hkv_ms": round(hkv, 3),
            "ratio": round(hkv / stock, 3),
            "stock_host_ms": round(stock_host, 3),
            "hkv_host_ms": round(hkv_host, 3),
            "host_ratio": round(hkv_host / stock_host, 3),
            "torchrec": torchrec.__version__,
        }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batches",
        type=AtLeast(1),
        nargs="+",
        default=[16384, 4096, 512],
        help="samples of a rank",
    )
    parser.add_argument("--max-rows", type=AtLeast(1), default=4_000_000, help="of a table")
    parser.add_argument("--dim", type=AtLeast(1), default=128)
    parser.add_argument(
        "--bottom", type=AtLeast(1), nargs="*", default=[512, 256], help="dense layers"
    )
    parser.add_argument(
        "--top",
        type=AtLeast(1),
        nargs="*",
        default=[1024, 1024, 512, 256],
        help="layers at the end",
    )
    parser.add_argument("--cross-layers", type=AtLeast(1), default=3)
    parser.add_argument("--cross-rank", type=AtLeast(1), default=512)
    parser.add_argument("--sharding", choices=("row_wise", "table_wise"), default="row_wise")
    parser.add_argument("--load", type=float, default=0.8, help="load factor of the hash tables")
    parser.add_argument("--steps", type=AtLeast(1), default=30, help="of a round")
    parser.add_argument("--rounds", type=AtLeast(1), default=5, help="of each side")
    parser.add_argument(
        "--warm-up", type=AtLeast(0), default=10, help="steps before the first round"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    args.device = device_of_rank(args.device)
    torch.set_float32_matmul_precision("high")  # TF32
    with joined_ranks(args.device, minutes=5):
        report_once(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
