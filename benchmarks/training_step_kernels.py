"""Memory traffic of the kernels of a training step, by Nsight Compute, and its lower bound.

    python -m benchmarks.training_step_kernels --out benchmarks/results/training_step_kernels.csv

Measures one step of a ``TableGroup`` on each workload of ``benchmarks.training_step``, after
warm-up steps. ``ncu``, which must be on the ``PATH``, measures the kernels one after the other,
without changing caches and clocks; in a normal step, some of them run concurrently.

- ``stage``: ``lookup`` finds or inserts ids; ``pooling`` is the forward with the concurrent
grouping
  of positions; ``update`` is the backward with the optimizer.
- ``kernel``: name of the kernel's function; or ``least`` for the lower bound of the stage's
traffic,
  see :func:`min_bytes`, and its time at the rate of a copy in HBM, measured in the same process.
- ``launches``, ``us``, ``read_mb``, ``written_mb``: number, microseconds and millions of bytes of
DRAM
  of all launches of the kernel in the stage.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import report
from benchmarks.training_step import (
    OPTIMIZERS,
    WORKLOADS,
    HashTables,
    Workload,
    workload_parser,
)

STAGES = ("lookup", "pooling", "update")
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),  # ns
    "read_mb": ("dram__bytes_read.sum", 1e-6),
    "written_mb": ("dram__bytes_write.sum", 1e-6),
}
#: The kernel of ``torch.cuda._sleep``, which separates stages.
MARK = "spin_kernel"
WARM_STEPS = 8
SECTOR = 32  # bytes: smallest access to DRAM
LINE = 128  # bytes of a bucket's digests
BUCKET_SLOTS = 64
COPY_BYTES = 2 << 30


def min_bytes(slots: Tensor, work: Workload, state_width: int) -> dict[str, tuple[int, int]]:
    """Returns the bytes that each stage must read and write, each once, starting with empty caches.

    Ids and slots take 8 bytes per position. A lookup reads a line of digests of each bucket and the
    sectors of ids, and reads and writes the sectors of last steps. Pooling reads rows and writes
    outputs. The update reads gradients, and reads and writes rows and states; a state of four bytes
    counts as a sector.

    Args:
        slots: slots of the positions, [positions], numbered over all tables.
        work: the workload.
        state_width: number of floats of a row's state.
    """

    def distinct(of_one: int) -> int:
        return int((slots // of_one).unique().numel())

    positions = 8 * slots.numel()
    rows = 4 * work.dim * distinct(1)
    columns = 4 * work.dim * work.tables * work.batch  # bytes of outputs, or of their gradients
    steps = SECTOR * distinct(SECTOR // 4)
    states = steps if state_width == 1 else 4 * state_width * distinct(1)
    found = LINE * distinct(BUCKET_SLOTS) + SECTOR * distinct(SECTOR // 8)
    return {
        "lookup": (positions + found + steps, positions + steps),
        "pooling": (positions + rows, columns),
        "update": (positions + columns + rows + states, rows + states),
    }


def copy_rate() -> float:
    """Returns the rate of a copy in HBM in bytes per second; counts reads and writes."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * COPY_BYTES / (min(times) / 1e3)


def run_step(name: str, optimizer: str, load: float) -> None:
    """Runs the step that ``ncu`` measures, and prints its least bytes and the rate of a copy."""
    device = torch.device("cuda")
    work = WORKLOADS[name]
    tables = HashTables(work, optimizer, load, device)
    batches = [work.draw(device) for _ in range(WARM_STEPS + 1)]
    offsets = torch.arange(work.tables * work.batch + 1, device=device) * work.bag
    grad = torch.randn(work.batch, work.tables * work.dim, device=device)
    for ids in batches[:-1]:
        tables.forward(ids, offsets).backward(grad)
        torch.cuda.synchronize()  # hints from a batch must arrive before the next begins
    rate = copy_rate()
    ids = batches[-1]
    group = tables.group
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, work.batch, pin)
    torch.cuda._sleep(1)
    out = group.pooled_lookup(
        tables.anchor, ids, offsets, None, slots, work.batch, False, pin, tables.learning_rate
    )
    torch.cuda._sleep(1)
    out.backward(grad)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    minimum = min_bytes(slots, work, OPTIMIZERS[optimizer][0].state_width(work.dim))
    print(json.dumps({"least": minimum, "rate": rate}))


def parse_kernels(lines: Iterable[str]) -> list[dict[str, object]]:
    """Parses the output of ``ncu --csv --page raw``. Returns a row per kernel name and stage.

    Raises:
        ValueError: the marks between the stages are missing.
    """
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    rows: dict[tuple[int, str], dict[str, object]] = {}
    stage = 0
    for kernel in table:
        if not kernel["ID"]:  # the line of units
            continue
        name = kernel["Kernel Name"]
        if MARK in name:
            stage += 1
            continue
        if stage == len(STAGES):
            break
        row = rows.setdefault(
            (stage, name),
            {"stage": STAGES[stage], "kernel": name, "launches": 0, **dict.fromkeys(METRICS, 0.0)},
        )
        row["launches"] += 1
        for column, (metric, scale) in METRICS.items():
            row[column] += float(kernel[metric].replace(",", "")) * scale
    if stage != len(STAGES) - 1:
        raise ValueError(f"ncu has {stage} of the {len(STAGES) - 1} marks between a step's stages.")
    return list(rows.values())


def measure_step(ncu: str, name: str, optimizer: str, load: float) -> Iterator[dict[str, object]]:
    """Yields the rows of one step: for each stage the lower bound, then its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--profile-from-start", "off", "--cache-control", "none"]
        command += ["--clock-control", "none", "--print-kernel-base", "function"]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--metrics", ",".join(metric for metric, _ in METRICS.values())]
        command += [sys.executable, "-m", "benchmarks.training_step_kernels"]
        command += ["--workloads", name, "--optimizers", optimizer, "--load", str(load), "--step"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            output = log.read_text() if log.exists() else ""
            raise RuntimeError(f"ncu exits with {done.returncode}.\n{output[-2000:]}")
        kernels = parse_kernels(log.read_text().splitlines())
    (output,) = [line for line in done.stdout.splitlines() if line.startswith('{"least"')]
    facts = json.loads(output)
    for stage in STAGES:
        read, written = facts["least"][stage]
        minimum = {"stage": stage, "kernel": "least", "launches": 0}
        minimum |= {"us": (read + written) / facts["rate"] * 1e6}
        minimum |= {"read_mb": read / 1e6, "written_mb": written / 1e6}
        for row in (minimum, *(kernel for kernel in kernels if kernel["stage"] == stage)):
            yield row | {column: round(row[column], 1) for column in METRICS}


def measure(args: argparse.Namespace, ncu: str) -> Iterator[dict[str, object]]:
    """Yields the rows of all workloads and optimizers."""
    for name in args.workloads:
        for optimizer in args.optimizers:
            for row in measure_step(ncu, name, optimizer, args.load):
                yield {"workload": name, "optimizer": optimizer, **row}


def main() -> None:
    """Parses arguments, measures, writes."""
    parser = workload_parser(__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument(
        "--step", action="store_true", help="only take the step, of one workload and optimizer"
    )
    args = parser.parse_args()
    if args.step:
        if len(args.workloads) + len(args.optimizers) != 2:
            parser.error("--step takes one of --workloads and one of --optimizers.")
        run_step(args.workloads[0], args.optimizers[0], args.load)
        return
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu, which comes with the CUDA toolkit, is not on the PATH.")
    report(measure(args, ncu), args.out)


if __name__ == "__main__":
    main()
