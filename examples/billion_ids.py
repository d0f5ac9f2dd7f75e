"""A billion ids in one embedding on one GPU, within bytes that are stated before.

    python examples/billion_ids.py                       # an H200: 10^9 ids, rows of 16
    python examples/billion_ids.py --optimizer adagrad --max-hbm-gb 110
    python examples/billion_ids.py --ids 1000000 --device cpu

Every id is looked up once and trained: the ids are a permutation of the integers, in no order. Then
it is checked that the table holds all of them, that rows are what one step of the optimizer made of
their initial values, and that the table took the bytes that were stated.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from click_data import DataError
from launch import positive, run

from torchrec_hkv import HierarchicalHashEmbedding, HKVAdagrad, HKVOptimizer
from torchrec_hkv.hash_table import initial_rows, table_memory
from torchrec_hkv.metrics import ConsoleLine, Watch
from torchrec_hkv.planner.report import format_bytes

# Nothing is evicted before a table is 95 % full.
LOAD = 0.9
# float32 values of state a column, by optimizer.
STATES = {"sgd": 0, "adagrad": 1}
LEARNING_RATE = 0.5
# An odd number, by which multiplication permutes the int64.
MULTIPLIER = -7046029254386353131


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=positive, default=10**9, help="(default: %(default)s)")
    parser.add_argument("--dim", type=positive, default=16, help="(default: %(default)s)")
    parser.add_argument(
        "--optimizer", choices=list(STATES), default="sgd", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=1 << 21, help="ids a step (default: %(default)s)"
    )
    parser.add_argument(
        "--max-hbm-gb",
        type=positive,
        metavar="GIB",
        help="of the GPU's memory; what is beyond lies in host memory (default: all in the GPU's)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default here: %(default)s)",
    )
    return parser.parse_args()


def stated_bytes(capacity: int, dim: int, optimizer: str) -> int:
    """What the table will take."""
    return table_memory(capacity, dim, STATES[optimizer] * dim, "lru", 4, None, capacity).bytes


def make(
    arguments: argparse.Namespace, capacity: int
) -> tuple[HierarchicalHashEmbedding, torch.optim.Optimizer]:
    """The embedding with memory for all ids from the start.

    Raises:
        DataError: there is too little memory.
    """
    try:
        embedding = HierarchicalHashEmbedding(
            arguments.dim,
            capacity,
            capacity,
            arguments.max_hbm_gb,
            grad_buffer_hbm_gb=8,
            seed=0,
            device=arguments.device,
        )
        if arguments.optimizer == "sgd":
            return embedding, HKVOptimizer(embedding, lr=LEARNING_RATE)
        return embedding, HKVAdagrad(embedding, lr=LEARNING_RATE)
    except ValueError as error:
        raise DataError(str(error)) from None


def batch(first: int, size: int, device: torch.device) -> torch.Tensor:
    """Distinct ids, spread over all int64."""
    return torch.arange(first, first + size, device=device) * MULTIPLIER


def train(
    embedding: HierarchicalHashEmbedding,
    optimizer: torch.optim.Optimizer,
    ids: int,
    batch_size: int,
) -> float:
    """Each id once; returns seconds."""
    steps = -(-ids // batch_size)
    began = time.perf_counter()
    with (
        ConsoleLine("a billion ids", steps) as line,
        Watch(embedding, max(1, steps // 20), [line]) as watch,
    ):
        for step in range(steps):
            first = step * batch_size
            rows = embedding(batch(first, min(batch_size, ids - first), embedding.device))
            rows.sum().backward()
            optimizer.step()
            watch.step()
            line.update(step + 1, samples=first)
    if embedding.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.no_grad()
def largest_error(embedding: HierarchicalHashEmbedding, ids: int, batch_size: int) -> float:
    """Of all rows, against what one step makes of an initial row."""
    embedding.eval()
    error = torch.zeros((), device=embedding.device)
    for first in range(0, ids, batch_size):
        part = batch(first, min(batch_size, ids - first), embedding.device)
        start = initial_rows(
            part,
            embedding.embedding_dim,
            table="embedding",
            seed=0,
            initializer=embedding.initializer,
        )
        # Of a gradient of ones: the step of Adagrad is that of SGD the first time.
        error = error.maximum((embedding(part) - (start - LEARNING_RATE)).abs().max())
    return error.item()


def main() -> None:
    """Parses arguments, states bytes, trains, checks.

    Raises:
        DataError: something is wrong with the input, in one sentence.
    """
    arguments = parse_arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise DataError("There is no GPU here: name --device cpu, and fewer --ids.")
    ids, dim = arguments.ids, arguments.dim
    capacity = int(ids / LOAD)
    stated = stated_bytes(capacity, dim, arguments.optimizer)
    print(
        f"{ids:,} ids, rows of {dim}, {arguments.optimizer}: the table will take"
        f" {format_bytes(stated)} ({stated:,} bytes)"
    )
    embedding, optimizer = make(arguments, capacity)
    seconds = train(embedding, optimizer, ids, arguments.batch_size)
    group = embedding.group
    taken = group.hbm_bytes(0) + group.host_bytes(0)
    counted = embedding.counters()["embedding"]
    error = largest_error(embedding, ids, arguments.batch_size)
    print(
        f"held {counted['size']:,} of {ids:,} ids, load factor"
        f" {counted['size'] / counted['capacity']:.3f}, evicted {counted['evicted']:,}, refused"
        f" {counted['refused']:,}"
    )
    off = f"{taken / stated - 1:+.2%} of what was stated"
    tiers = (
        f"{format_bytes(group.hbm_bytes(0))} of HBM, {format_bytes(group.host_bytes(0))} of host"
    )
    print(f"took {format_bytes(taken)} ({taken:,} bytes: {tiers} memory), {off}")
    print(f"largest error of a row {error:.1e}; {ids / seconds:,.0f} ids/s trained")
    if counted["size"] != ids or error > 1e-5 or abs(taken - stated) > 0.05 * stated:
        raise DataError("The table does not hold what it should.")


if __name__ == "__main__":
    sys.exit(run(main))
