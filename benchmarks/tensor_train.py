"""A training step of Tensor-Train tables on a GPU, compared with a dense table of FBGEMM.

    python -m benchmarks.tensor_train --out benchmarks/results/tensor_train.csv

A step is forward, backward and SGD through the torch op. Times are nanoseconds per id, each in tf32
and in fp32 precision: of back-to-back steps (``eager``), the same with autograd's backward on the
calling thread (``eager_one_thread``: ``torch.autograd.set_multithreading_enabled(False)``), of
steps that begin when the device is idle (``single``), and of back-to-back replays of a CUDA graph
(``graph``). If FBGEMM is installed, workloads that name it also run with its table of the same
rows, columns and ids; ``ratio`` is the eager time divided by FBGEMM's. Steps use four batches in
turn. Each workload is first compared with a lookup in float64; ``error`` is the relative error in
the norm.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import power_law
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape, initial_cores, max_ranks

RATE = 0.01
BATCHES = 4
REFERENCE = (200, 220, 250)
#: Row factors of eight tables of different sizes.
EIGHT = (
    REFERENCE,
    (120, 130, 140),
    (60, 64, 66),
    (310, 300, 290),
    (40, 45, 50),
    (100, 90, 110),
    (170, 180, 190),
    (25, 30, 28),
)

try:
    import fbgemm_gpu  # noqa: F401  (registers its ops)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    HAS_FBGEMM = True
except ImportError:
    HAS_FBGEMM = False
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("workload", "ids", "rank", "precision")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables, and bags of one length for each table."""

    p: tuple[tuple[int, ...], ...]
    rank: int
    batch: int
    bag: int
    power: float = 0.0  # exponent of the power law; 0 for uniform ids
    beside_fbgemm: bool = False

    def scaled(self, divisor: int) -> Workload:
        """Returns a workload with fewer bags and smaller row factors."""
        p = tuple(tuple(max(2, factor // divisor) for factor in factors) for factors in self.p)
        return dataclasses.replace(self, p=p, batch=max(1, self.batch // divisor))

    @property
    def shapes(self) -> list[TTShape]:
        """Returns the shapes of the tables."""
        q, shapes = (4, 4, 4), []
        for p in self.p:
            ranks = tuple(min(self.rank, maximum) for maximum in max_ranks(p, q))
            shapes.append(TTShape(math.prod(p), 64, p, q, ranks))
        return shapes

    def draw(self) -> Tensor:
        """Draws the ids of one batch, feature-major."""
        device, n = torch.device("cuda"), self.batch * self.bag
        ids = []
        for shape in self.shapes:
            rows = shape.num_embeddings
            if self.power:
                # Spreads ranks over the table; ids in order of arrival would be clustered.
                drawn = power_law(n, rows, self.power, device) * 7_368_787 % rows
            else:
                drawn = torch.randint(rows, (n,), device=device)
            ids.append(drawn)
        return torch.cat(ids)


WORKLOADS = {
    "10k uniform": Workload((REFERENCE,), 32, 512, 20),
    "10k power law": Workload((REFERENCE,), 32, 512, 20, 1.2),
    "131k uniform": Workload((REFERENCE,), 32, 8192, 16),
    "131k power law": Workload((REFERENCE,), 32, 8192, 16, 1.2),
    "1.31M uniform": Workload((REFERENCE,), 32, 65536, 20),
    "1.31M power law": Workload((REFERENCE,), 32, 65536, 20, 1.2, beside_fbgemm=True),
    "1.31M uniform rank 64": Workload((REFERENCE,), 64, 65536, 20),
    "1.31M power law rank 64": Workload((REFERENCE,), 64, 65536, 20, 1.2),
    "1.31M uniform rank 128": Workload((REFERENCE,), 128, 65536, 20),
    "131k of 8 tables": Workload(EIGHT, 32, 1024, 16),
    "131k of 8 tables power law": Workload(EIGHT, 32, 1024, 16, 1.2),
}


class TensorTrain:
    """The package's tables."""

    def __init__(self, work: Workload, precision: str) -> None:
        self.work = work
        self.group = TTGroup(work.shapes, optimizer=SGD(), precision=precision)
        self.cores = [
            core for shape in work.shapes for core in initial_cores(shape, std=0.1, device="cuda")
        ]
        self.states = self.group.make_states("cuda")
        self.counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.rate = torch.tensor(RATE, device="cuda")
        self.anchor = torch.zeros(0, device="cuda", requires_grad=True)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns pooled rows, whose backward trains the cores."""
        return self.group.lookup_fused(
            self.anchor, self.cores, self.states, self.counter, ids, offsets, self.work.batch,
            self.rate,
        )  # fmt: skip

    def error(self, ids: Tensor, offsets: Tensor) -> float:
        """Returns the relative error of the first table's first bags compared with float64."""
        shape, bags = self.work.shapes[0], min(self.work.batch, 200)
        digits, rest = [], ids[: bags * self.work.bag]
        for p in reversed(shape.p):
            digits.append(rest % p)
            rest = rest // p
        head, middle, last = (
            core.double().reshape(shape.core_shape(k))
            for k, core in enumerate(self.cores[self.group.cores_of(0)])
        )
        rows = head[digits[2]][:, 0]
        rows = torch.einsum("nur,nrvs->nuvs", rows, middle[digits[1]]).flatten(1, 2)
        rows = torch.einsum("nur,nvr->nuv", rows, last[digits[0]][..., 0]).flatten(1)
        expected = rows.reshape(bags, self.work.bag, -1).sum(dim=1)
        with torch.no_grad():
            out = self.group.lookup(self.cores, ids, offsets, self.work.batch)
        return float((out[:bags, :64] - expected).norm() / expected.norm())


def make_fbgemm(work: Workload) -> Callable[[Tensor, Tensor], Tensor]:
    """Creates FBGEMM's dense tables."""
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (shape.num_embeddings, 64, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
            for shape in work.shapes
        ],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=RATE,
        pooling_mode=PoolingMode.SUM,
        device=torch.device("cuda"),
    )
    tables.init_embedding_weights_uniform(-0.05, 0.05)
    return tables


def nanoseconds(step: Callable[[int], None], steps: int, ids: int) -> tuple[float, float]:
    """Returns median nanoseconds per id, of back-to-back steps and of single steps."""

    def timed(first: int, last: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for at in range(first, last):
            step(at)
        end.record()
        end.synchronize()
        return 1e6 * begin.elapsed_time(end) / (last - first) / ids

    timed(0, 5)
    together = [timed(0, steps) for _ in range(5)]
    single = [timed(at, at + 1) for at in range(steps)]
    return statistics.median(together), statistics.median(single)


def captured(step: Callable[[Tensor], None], ids: Tensor) -> torch.cuda.CUDAGraph:
    """Captures the step on these ids."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(ids)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(ids)
    return graph


def measure(work: Workload, precision: str, steps: int) -> dict[str, object]:
    """Measures the figures of a row."""
    batches = [work.draw() for _ in range(BATCHES)]
    n = batches[0].numel()
    offsets = torch.arange(n // work.bag + 1, device="cuda") * work.bag
    grad = torch.randn(work.batch, 64 * len(work.p), device="cuda")
    tables = TensorTrain(work, precision)
    row: dict[str, object] = {
        "ids": n,
        "distinct": batches[0].unique().numel() if len(work.p) == 1 else "",
        "rank": work.rank,
        "precision": precision,
        "error": f"{tables.error(batches[0], offsets):.1e}",
    }

    def backward(forward: Callable[[Tensor, Tensor], Tensor], ids: Tensor) -> None:
        forward(ids, offsets).backward(grad)

    eager, single = nanoseconds(
        lambda at: backward(tables.forward, batches[at % BATCHES]), steps, n
    )
    with torch.autograd.set_multithreading_enabled(False):
        one_thread, _ = nanoseconds(
            lambda at: backward(tables.forward, batches[at % BATCHES]), steps, n
        )
    graphs = [captured(lambda ids: backward(tables.forward, ids), ids) for ids in batches]
    replayed, _ = nanoseconds(lambda at: graphs[at % BATCHES].replay(), steps, n)
    row |= {
        "eager_ns_per_id": round(eager, 3),
        "eager_one_thread_ns_per_id": round(one_thread, 3),
        "single_ns_per_id": round(single, 3),
        "graph_ns_per_id": round(replayed, 3),
        "fbgemm_ns_per_id": "",
        "ratio": "",
    }
    if work.beside_fbgemm and HAS_FBGEMM:
        dense = make_fbgemm(work)
        fbgemm_ns, _ = nanoseconds(lambda at: backward(dense, batches[at % BATCHES]), steps, n)
        row |= {"fbgemm_ns_per_id": round(fbgemm_ns, 3), "ratio": round(eager / fbgemm_ns, 3)}
    return row


def _rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for name in args.workloads:
        for precision in args.precisions:
            work = WORKLOADS[name].scaled(args.divisor)
            yield {"workload": name, **measure(work, precision, args.steps)}
            torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--precisions", nargs="+", choices=["tf32", "fp32"], default=["tf32", "fp32"]
    )
    parser.add_argument("--steps", type=AtLeast(1), default=50, help="timed steps a round")
    parser.add_argument(
        "--divisor", type=AtLeast(1), default=1, help="of row factors and bags, for tests"
    )
    parser.add_argument("--out", type=Path, default=None, help="CSV file")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU; benchmarks.tensor_train_cpu needs none.")
    report(_rows(args), args.out, KEYS)


if __name__ == "__main__":
    main()
