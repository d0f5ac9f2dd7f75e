"""A training step of a Tensor-Train table on a CPU, compared with torch.einsum.

    python -m benchmarks.tensor_train_cpu --out benchmarks/results/tensor_train_cpu.csv

A step is forward, backward and SGD. The comparison gathers the slices of each id, contracts them
with torch.einsum from left to right, pools with index_add, and uses autograd for the backward. Both
sides take turns on the same ids and bags, from the same cores, which are compared after the first
step. Reported are minima of the processor time of all threads, which other load on the machine
affects least, and of wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import power_law
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape, initial_cores

RATE = 0.01


@dataclasses.dataclass
class Batch:
    """Bags of equal length."""

    ids: Tensor
    offsets: Tensor
    bags: Tensor  # bag of each id
    size: int


class TensorTrain:
    """The package's table."""

    def __init__(self, shape: TTShape, cores: list[Tensor]) -> None:
        self.cores = cores
        self.group = TTGroup([shape], optimizer=SGD())
        self.states = self.group.make_states()
        self.counter = torch.zeros(1, dtype=torch.int64)
        self.rate = torch.tensor(RATE)
        self.anchor = torch.zeros(0, requires_grad=True)

    def step(self, batch: Batch) -> None:
        out = self.group.lookup_fused(
            self.anchor,
            self.cores,
            self.states,
            self.counter,
            batch.ids,
            batch.offsets,
            batch.size,
            self.rate,
        )
        (out.square().sum() / batch.size).backward()


class Einsum:
    """The comparison with torch.einsum."""

    def __init__(self, shape: TTShape, cores: list[Tensor]) -> None:
        self.shape = shape
        self.cores = [core.clone().requires_grad_() for core in cores]

    def step(self, batch: Batch) -> None:
        digits, left = [], batch.ids
        for p in reversed(self.shape.p):
            digits.append(left % p)
            left = left // p
        slices = [core[digit] for core, digit in zip(self.cores, reversed(digits), strict=True)]
        rows = slices[0][:, 0]  # [n, q, r]
        for middle in slices[1:-1]:
            rows = torch.einsum("nur,nrvs->nuvs", rows, middle).flatten(1, 2)
        rows = torch.einsum("nur,nvr->nuv", rows, slices[-1][..., 0]).flatten(1)
        out = torch.zeros(batch.size, self.shape.embedding_dim).index_add(0, batch.bags, rows)
        (out.square().sum() / batch.size).backward()
        with torch.no_grad():
            for core in self.cores:
                core -= RATE * core.grad
                core.grad = None


def _ids(stream: str, n: int, rows: int) -> Tensor:
    if stream == "uniform":
        return torch.randint(0, rows, (n,))
    # Spreads ranks over the table; ids in order of arrival would be clustered.
    return power_law(n, rows, 1.2, torch.device("cpu")) * 7_368_787 % rows


def _minimum(
    sides: dict[str, TensorTrain | Einsum], batch: Batch, rounds: int
) -> dict[str, tuple[float, float]]:
    """Returns (wall time, processor time of all threads) of each side, in nanoseconds per id."""
    minimum = {name: (float("inf"), float("inf")) for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            side.step(batch)
            passed, spent = time.perf_counter() - begin, time.process_time() - begin_cpu
            minimum[name] = (min(minimum[name][0], passed), min(minimum[name][1], spent))
    scale = 1e9 / batch.ids.numel()
    return {name: (scale * passed, scale * spent) for name, (passed, spent) in minimum.items()}


def _rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    shape = TTShape(args.rows, 64, tuple(args.p), (4, 4, 4), (args.rank, args.rank))
    for n, stream in itertools.product(args.ids, ("uniform", "power law 1.2")):
        size = n // args.bag
        ids = _ids(stream, size * args.bag, args.rows)
        offsets = torch.arange(0, ids.numel() + 1, args.bag)
        batch = Batch(ids, offsets, torch.arange(ids.numel()) // args.bag, size)
        cores = initial_cores(shape, std=0.1)
        sides = {"einsum": Einsum(shape, cores), "tt": TensorTrain(shape, cores)}
        for side in sides.values():
            side.step(batch)
        for one, other in zip(cores, sides["einsum"].cores, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)
        minimum = _minimum(sides, batch, args.rounds)
        yield {
            "operation": "forward, backward and SGD",
            "p": " ".join(map(str, args.p)),
            "rank": args.rank,
            "ids": ids.numel(),
            "distinct": ids.unique().numel(),
            "stream": stream,
            "threads": torch.get_num_threads(),
            "tt_cpu_ns_per_id": round(minimum["tt"][1], 1),
            "einsum_cpu_ns_per_id": round(minimum["einsum"][1], 1),
            "cpu_ratio": round(minimum["tt"][1] / minimum["einsum"][1], 4),
            "tt_ns_per_id": round(minimum["tt"][0], 1),
            "einsum_ns_per_id": round(minimum["einsum"][0], 1),
            "ratio": round(minimum["tt"][0] / minimum["einsum"][0], 4),
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=AtLeast(1), default=11_000_000)
    parser.add_argument("--p", type=AtLeast(1), nargs=3, default=[200, 220, 250])
    parser.add_argument("--rank", type=AtLeast(1), default=32)
    parser.add_argument("--ids", type=AtLeast(1), nargs="+", default=[10_240, 131_072])
    parser.add_argument("--bag", type=AtLeast(1), default=20, help="ids a bag")
    parser.add_argument("--rounds", type=AtLeast(1), default=5)
    parser.add_argument("--threads", type=AtLeast(1), default=2)
    parser.add_argument("--out", type=Path, default=None, help="CSV file to append to")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    report(_rows(args), args.out)


if __name__ == "__main__":
    main()
