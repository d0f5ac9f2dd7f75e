"""Trains a billion ids in one embedding on one GPU, within a memory bound that is stated first.

    python examples/billion_ids.py                       # an H200: 10^9 ids, rows of 16
    python examples/billion_ids.py --optimizer adagrad --max-hbm-gb 110
    python examples/billion_ids.py --ids 1000000 --device cpu
    torchrun --nproc_per_node 2 examples/billion_ids.py  # each process has a part of the ids
    python examples/billion_ids.py --ids 1000000 --device cpu --save table
    python examples/billion_ids.py --ids 2000000 --device cpu --resume table  # the other million

The ids are spread over all int64. Each is looked up and trained once. Then the example checks that
the table holds all ids, that each row equals its initial row after one step of the optimizer, and
that the table took no more bytes than stated. The exit code is 1 if a check fails, and 2 for bad
input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from click_data import DataError
from launch import (
    Parser,
    add_device_and_outputs,
    check_device_and_outputs,
    positive,
    run,
)
from plot import Bars, Curves, add_plot, check_plot, write_panels
from saves import check_saves

from torchrec_hkv import HierarchicalHashEmbedding, HKVAdagrad, HKVOptimizer
from torchrec_hkv.hash_table import files, gpu_table_bytes, initial_rows, table_memory
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.metrics import ConsoleLine, TensorBoard, Watch
from torchrec_hkv.planner.report import format_bytes

# Nothing is evicted before a table is 95 % full.
LOAD = 0.9
# Number of float32 state values per column, by optimizer.
STATES = {"sgd": 0, "adagrad": 1}
LEARNING_RATE = 0.5
# GiB for everything except the table, such as gradients.
GRADIENTS_GB = 8
# Rank of this process under torchrun.
RANK = int(os.environ.get("RANK", "0"))
# Multiplication by an odd number is a permutation of int64.
MULTIPLIER = -7046029254386353131


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        help="limit of the table in HBM; further rows are in host memory (default: no limit)",
    )
    add_device_and_outputs(parser)
    add_plot(parser, "the speed while ids are trained, and the bytes that the table took")
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="save the table of each process at the end"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="load what --save wrote with as many processes, and train only the ids that it lacks",
    )
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class MemoryBytes:
    """Bytes in HBM and in host memory."""

    hbm: int
    host: int

    def __str__(self) -> str:
        return f"{self.hbm:,} bytes of HBM, {self.host:,} of host memory"

    @property
    def total(self) -> int:
        return self.hbm + self.host


def stated_bytes(arguments: argparse.Namespace, capacity: int) -> MemoryBytes:
    """Computes the bytes that the table will take."""
    states = STATES[arguments.optimizer] * arguments.dim
    memory = table_memory(capacity, arguments.dim, states, "lru", initial_capacity=capacity)
    if arguments.device == "cpu":
        return MemoryBytes(0, memory.bytes)
    limit = None if arguments.max_hbm_gb is None else arguments.max_hbm_gb << 30
    return MemoryBytes(*gpu_table_bytes(memory, limit))


def make(
    arguments: argparse.Namespace, capacity: int
) -> tuple[HierarchicalHashEmbedding, torch.optim.Optimizer]:
    """Creates the embedding, with memory for all ids, and its optimizer.

    Raises:
        DataError: there is too little memory.
    """
    try:
        embedding = HierarchicalHashEmbedding(
            arguments.dim,
            capacity,
            capacity,
            arguments.max_hbm_gb,
            grad_buffer_hbm_gb=GRADIENTS_GB,
            seed=0,
            device=arguments.device,
        )
        if arguments.optimizer == "sgd":
            return embedding, HKVOptimizer(embedding, lr=LEARNING_RATE)
        return embedding, HKVAdagrad(embedding, lr=LEARNING_RATE)
    except ValueError as error:
        raise DataError(str(error)) from None


def batches(part: range, batch_size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields batches of distinct ids."""
    for first in range(0, len(part), batch_size):
        batch = part[first : first + batch_size]
        yield torch.arange(batch.start, batch.stop, batch.step, device=device) * MULTIPLIER


def train(
    embedding: HierarchicalHashEmbedding,
    optimizer: torch.optim.Optimizer,
    part: range,
    batch_size: int,
    folder: Path | None,
) -> tuple[float, list[tuple[float, float]]]:
    """Trains each id once.

    Returns:
        Seconds, and pairs for a plot: (million ids, million ids per second since the last pair).
    """
    steps = -(-len(part) // batch_size)
    every = max(1, steps // 20)
    began = last = time.perf_counter()
    speeds: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(ConsoleLine("a billion ids", steps, shown=RANK == 0))
        sinks = [line]
        if folder is not None:
            sinks.append(stack.enter_context(TensorBoard(folder / f"rank_{RANK}")))
        watch = stack.enter_context(Watch(embedding, every, sinks))
        for step, ids in enumerate(batches(part, batch_size, embedding.device), start=1):
            embedding(ids).sum().backward()
            optimizer.step()
            watch.step()
            trained = min(step * batch_size, len(part))
            line.update(step, samples=trained)
            if step % every == 0:
                if embedding.device.type == "cuda":
                    torch.cuda.synchronize()
                now = time.perf_counter()
                number = every * batch_size - (step * batch_size - trained)
                speeds.append((trained / 1e6, number / 1e6 / (now - last)))
                last = now
    if embedding.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, speeds


def resume(embedding: HierarchicalHashEmbedding, folder: Path, part: range) -> int:
    """Loads the table of this process.

    Returns:
        The number of its ids that are already trained.

    Raises:
        DataError: there is no such table, it does not fit, or it has more ids than the part.
    """
    saved = folder / f"rank_{RANK}"
    try:
        trained = Manifest.read(saved).entries
        if trained > len(part):
            raise DataError(f"{saved} holds {trained:,} ids: give --ids at least as many.")
        files.load(embedding.group, 0, saved)
    except ValueError as error:
        raise DataError(str(error)) from None
    return trained


@torch.no_grad()
def largest_error(embedding: HierarchicalHashEmbedding, part: range, batch_size: int) -> float:
    """Returns the largest difference between a row and its initial row after one step."""
    embedding.eval()
    error = torch.zeros((), device=embedding.device)
    for ids in batches(part, batch_size, embedding.device):
        start = initial_rows(
            ids,
            embedding.embedding_dim,
            table="embedding",
            seed=0,
            initializer=embedding.initializer,
        )
        # For a gradient of 1, the first step of Adagrad equals that of SGD.
        error = error.maximum((embedding(ids) - (start - LEARNING_RATE)).abs().max())
    return error.item()


def failures(
    embedding: HierarchicalHashEmbedding, ids: int, error: float, stated: MemoryBytes
) -> list[str]:
    """Prints the table's size and memory; returns a sentence per check that failed."""
    group, counted = embedding.group, embedding.counters()["embedding"]
    used = MemoryBytes(group.hbm_bytes(0), group.host_bytes(0))
    print(
        f"held {counted['size']:,} of {ids:,} ids, load factor"
        f" {counted['size'] / counted['capacity']:.3f}, evicted {counted['evicted']:,}, refused"
        f" {counted['refused']:,}"
    )
    off = f"{used.total / stated.total - 1:+.2%} of what was stated"
    print(f"the table took {format_bytes(used.total)} ({used}), {off}")
    found = []
    if counted["size"] != ids:
        found.append(f"The table holds {counted['size']:,} ids, but should hold {ids:,}.")
    if error > 1e-5:
        found.append(f"A row is off by {error:.1e}.")
    # GPU memory is allocated in pages of 2 MiB, several per table.
    if used.hbm > stated.hbm + (64 << 20) or used.host > stated.host + (64 << 20):
        found.append(f"The table took {used}, but {stated} were stated.")
    if embedding.device.type == "cuda":
        peak, maximum = torch.cuda.max_memory_reserved(), stated.hbm + (GRADIENTS_GB << 30)
        print(f"all took at most {peak:,} bytes of HBM; {maximum:,} were stated")
        if peak > maximum:
            found.append(f"{peak:,} bytes of HBM were taken, but {maximum:,} were stated.")
    return found


def main() -> int:
    """Parses arguments, states bytes, trains, checks.

    Returns:
        The exit code.

    Raises:
        DataError: the input is invalid.
    """
    arguments = parse_arguments()
    check_device_and_outputs(arguments)
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.ids < processes:
        raise DataError(f"--ids is {arguments.ids}, but there are {processes} processes.")
    check_plot(arguments.plot)
    check_saves(arguments)
    part = range(RANK, arguments.ids, processes)
    ids, dim = len(part), arguments.dim
    capacity = int(ids / LOAD)
    stated = stated_bytes(arguments, capacity)
    print(
        f"{ids:,} ids, rows of {dim}, {arguments.optimizer}: the table will take"
        f" {format_bytes(stated.total)} ({stated})"
    )
    if arguments.device == "cuda":
        print(f"with gradients at most {format_bytes(stated.hbm + (GRADIENTS_GB << 30))} of HBM")
    embedding, optimizer = make(arguments, capacity)
    trained = 0 if arguments.resume is None else resume(embedding, arguments.resume, part)
    size = arguments.batch_size
    seconds, speeds = train(embedding, optimizer, part[trained:], size, arguments.tensorboard)
    error = largest_error(embedding, part, arguments.batch_size)
    found = failures(embedding, ids, error, stated)
    speed = (ids - trained) / seconds
    print(f"largest error of a row {error:.1e}; {speed:,.0f} ids/s trained")
    if arguments.save:
        files.save(embedding.group, 0, arguments.save / f"rank_{RANK}")
        print(f"Written: {arguments.save / f'rank_{RANK}'}")
    if arguments.plot and RANK == 0:
        group = embedding.group
        used = group.hbm_bytes(0) + group.host_bytes(0)
        panels = [
            Curves("million ids", "million ids a second", {"trained": speeds}),
            Bars("MiB", {"stated": stated.total / 2**20, "taken": used / 2**20}),
        ]
        write_panels(arguments.plot, f"{ids:,} ids, rows of {dim}", panels)
    if arguments.json and RANK == 0:
        figures = {"ids": ids, "dim": dim, "optimizer": arguments.optimizer, "seconds": seconds}
        figures |= {"stated_bytes": stated.total, "error": error, "failures": found}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    for sentence in found:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(run(main))
