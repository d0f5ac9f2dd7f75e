"""Steps of ``HierarchicalHashEmbedding`` compared with ``torch.nn.Embedding(sparse=True)``.

    python -m benchmarks.nn --out benchmarks/results/nn.csv

One row per optimizer has milliseconds per step (lookup, backward of a given gradient, ``step()``,
``zero_grad()``) of back-to-back steps, for both modules in one process, on the same ids, with equal
initial rows and equally many rows. All ids are already in the table. ``ratio`` is the hash
embedding's time divided by PyTorch's, ``difference`` the largest difference of a value in 10,000
rows after the last step.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import power_law
from benchmarks.timing import steps_ms
from torchrec_hkv import HierarchicalHashEmbedding, HKVAdagrad, HKVAdamOptimizer, HKVOptimizer

Step = Callable[[int], None]
OPTIMIZERS = {
    "adam": (lambda e: HKVAdamOptimizer(e, lr=1e-3), lambda p: torch.optim.SparseAdam(p, lr=1e-3)),
    "adagrad": (lambda e: HKVAdagrad(e, lr=1e-2), lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "sgd": (lambda e: HKVOptimizer(e, lr=1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """The lookups.

    Attributes:
        rows: number of distinct ids.
        dim: number of columns.
        ids: number of ids per step.
        power: exponent of the ids' power law; 0 for uniform ids.
        load: load factor of the hash table.
    """

    rows: int
    dim: int
    ids: int
    power: float
    load: float

    def draw(self, device: torch.device) -> Tensor:
        """Draws the ids of one step, int64 ``[ids]``."""
        if self.power:
            return power_law(self.ids, self.rows, self.power, device)
        return torch.randint(self.rows, (self.ids,), device=device)


def hash_embedding(
    work: Workload, optimizer: str, device: torch.device
) -> tuple[HierarchicalHashEmbedding, torch.optim.Optimizer]:
    """Creates an embedding that holds all ids, and its optimizer."""
    capacity = int(work.rows / work.load)
    module = HierarchicalHashEmbedding(
        work.dim, capacity, capacity, grad_buffer_hbm_gb=64, seed=0, device=device
    )
    trained_by = OPTIMIZERS[optimizer][0](module)
    for part in torch.arange(work.rows, device=device).split(1 << 20):
        module(part)
    size = module.counters()["embedding"]["size"]
    if size != work.rows:
        raise RuntimeError(f"{work.rows - size} ids found no place; --load must be lower.")
    return module, trained_by


def compare(work: Workload, optimizer: str, steps: int, device: torch.device) -> dict[str, float]:
    """Returns milliseconds of both sides, and the largest difference of their rows."""
    batches = [work.draw(device) for _ in range(4)]
    # Multiples of 1/8, whose sums are exact. Adam would amplify a gradient that is 0 except for
    # rounding, and SparseAdam adds eps elsewhere, which matters for tiny gradients.
    grad = torch.randn(work.ids, work.dim, device=device).mul_(8).round_().div_(8)
    hash_module, hash_optimizer = hash_embedding(work, optimizer, device)
    dense_module = torch.nn.Embedding(work.rows, work.dim, sparse=True, device=device)
    with torch.no_grad():
        for part in torch.arange(work.rows, device=device).split(1 << 20):
            dense_module.weight[part] = hash_module(part)
    their_optimizer = OPTIMIZERS[optimizer][1](dense_module.parameters())

    def step_of(module: torch.nn.Module, trained_by: torch.optim.Optimizer) -> Step:
        def step(at: int) -> None:
            module(batches[at % 4]).backward(grad)
            trained_by.step()
            trained_by.zero_grad()

        return step

    result = {
        "hkv_ms": steps_ms(step_of(hash_module, hash_optimizer), steps, device),
        "torch_ms": steps_ms(step_of(dense_module, their_optimizer), steps, device),
    }
    result["ratio"] = result["hkv_ms"] / result["torch_ms"]
    sample = batches[0][:10_000]
    with torch.no_grad():
        result["difference"] = (hash_module(sample) - dense_module(sample)).abs().max().item()
    return result


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per optimizer."""
    device = torch.device(args.device)
    work = Workload(args.rows, args.dim, args.ids, args.power, args.load)
    for optimizer in args.optimizers:
        figures = compare(work, optimizer, args.steps, device)
        rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
        yield {"optimizer": optimizer, **dataclasses.asdict(work), **rounded}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=AtLeast(1), default=10_000_000, help="distinct ids")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--ids", type=AtLeast(1), default=1 << 20, help="ids a step")
    parser.add_argument("--power", type=float, default=0.0, help="of a power law; 0: uniform")
    parser.add_argument("--load", type=float, default=0.8, help="load factor of the hash table")
    parser.add_argument("--steps", type=AtLeast(1), default=20)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=["adam"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out)


if __name__ == "__main__":
    main()
