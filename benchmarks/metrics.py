"""Overhead of metrics: training steps with and without them, in turn, in one process.

    python -m benchmarks.metrics --out benchmarks/results/metrics.csv

A step looks up ids of several tables, runs the backward and updates the rows with Adagrad. Case
``watch`` reads the metrics of all tables and passes them to a progress line; its tables hold all
ids. It reads in every step, and the cost is divided by ``--every``, because one reading in a
hundred steps could not be distinguished from noise. Case ``remember_evicted`` counts ids that
return, in full tables that lack a share ``--new`` of the ids of a step, compared with equal tables
without this option, on the same ids. Half of the missing ids are new, and half were evicted before.
These tables are created ``--builds`` times, in alternating order, because their addresses also
affect times.

A pair is a round of steps with metrics and a round without, back to back, in alternating order. A
round is timed from its first step to the end of its last step on the device. So both rounds contain
any drift that is slower than a pair. ``without_ms`` and ``with_ms`` are milliseconds per step,
medians over the rounds. ``overhead`` is the median over the pairs of the additional time of steps
with metrics, as a share; ``overhead_low`` and ``overhead_high`` are its 95 % bootstrap interval.
For ``watch``, these three are for a reading every ``--every`` steps, while ``with_ms`` is for a
reading in each step. Pairs are measured for ``--seconds`` per case.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from torchrec_hkv import HKVAdagrad, MultiTableHKVEmbedding
from torchrec_hkv.metrics import ConsoleLine, Watch

Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables of one shape, and the lookups of a step.

    Attributes:
        tables: number of tables.
        rows: number of distinct ids per table.
        dim: number of columns.
        ids: number of ids per table and step.
    """

    tables: int
    rows: int
    dim: int
    ids: int


def make(
    work: Workload, device: torch.device, capacity: int, remember_evicted: int | None = None
) -> tuple[MultiTableHKVEmbedding, torch.optim.Optimizer]:
    """Creates tables that are filled with the ids from 0 on."""
    module = MultiTableHKVEmbedding(
        work.tables,
        work.dim,
        capacity,
        init_capacity_per_table=capacity,
        grad_buffer_hbm_gb=16,
        seed=0,
        device=device,
        remember_evicted=remember_evicted,
    )
    trained_by = HKVAdagrad(module, lr=0.01)
    for part in torch.arange(work.rows, device=device).split(1 << 18):
        module([part] * work.tables)
    return module, trained_by


def step_of(
    work: Workload,
    module: MultiTableHKVEmbedding,
    trained_by: torch.optim.Optimizer,
    draw: Callable[[], list[Tensor]],
) -> Step:
    """Creates a training step."""
    grads = [torch.randn(work.ids, work.dim, device=module.device)] * work.tables

    def step() -> None:
        torch.autograd.backward(module(draw()), grads)
        trained_by.step()
        trained_by.zero_grad()

    return step


def round_ms(step: Step, steps: int, device: torch.device) -> float:
    """Returns milliseconds per step of back-to-back steps."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        for _ in range(steps):
            step()
        return 1000 * (time.perf_counter() - begin_s) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


def pairs_of(
    without: Step, with_: Step, steps: int, seconds: float, device: torch.device
) -> list[tuple[float, float]]:
    """Returns milliseconds per step of at least two pairs (without, with), after two for
    warm-up."""
    for step in (without, with_) * 2:
        round_ms(step, steps, device)
    pairs: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()  # a garbage collection would only affect one of the two
    try:
        begin = time.perf_counter()
        while len(pairs) < 2 or time.perf_counter() - begin < seconds:
            if len(pairs) % 2:
                first = round_ms(with_, steps, device)
                pairs.append((round_ms(without, steps, device), first))
            else:
                first = round_ms(without, steps, device)
                pairs.append((first, round_ms(with_, steps, device)))
    finally:
        gc.enable()
    return pairs


def compared(pairs: Sequence[tuple[float, float]], spread: int = 1) -> dict[str, float]:
    """Computes the overhead of steps with metrics, divided by ``spread`` steps."""
    overheads = [(with_ms / without_ms - 1) / spread for without_ms, with_ms in pairs]
    low, high = bootstrap_interval(overheads)
    return {
        "pairs": len(pairs),
        "without_ms": statistics.median(pair[0] for pair in pairs),
        "with_ms": statistics.median(pair[1] for pair in pairs),
        "overhead": statistics.median(overheads),
        "overhead_low": low,
        "overhead_high": high,
    }


def bootstrap_interval(
    values: Sequence[float], share: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """Computes a confidence interval of the median of values.

    Args:
        values: independent values.
        share: probability of the interval, between 0 and 1.
        draws: number of resamples with replacement.
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    outside = int((1 - share) / 2 * draws)
    return medians[outside], medians[draws - 1 - outside]


def watch(work: Workload, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Measures reading metrics in each step, divided by the number of steps between readings."""
    module, trained_by = make(work, device, int(work.rows / 0.8))
    batches = [
        [torch.randint(work.rows, (work.ids,), device=device) for _ in range(work.tables)]
        for _ in range(4)
    ]
    at = iter(range(1 << 60))
    step = step_of(work, module, trained_by, lambda: batches[next(at) % 4])
    with (
        ConsoleLine("benchmark", shown=False) as line,
        Watch(module, 1, [line]) as watching,
    ):

        def watched() -> None:
            step()
            watching.step()

        pairs = pairs_of(step, watched, args.steps, args.seconds, device)
    return compared(pairs, args.every)


def remember_evicted(
    work: Workload, args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Measures remembering the ids that full tables evict."""
    pairs: list[tuple[float, float]] = []
    for build in range(args.builds):
        steps = {}
        for entries in (None, work.rows) if build % 2 == 0 else (work.rows, None):
            steps[entries] = evicting(work, args.new, entries, device)
        without, with_ = steps[None], steps[work.rows]
        pairs += pairs_of(without, with_, args.steps, args.seconds / args.builds, device)
    return compared(pairs)


def evicting(work: Workload, share: float, entries: int | None, device: torch.device) -> Step:
    """Creates a step of full tables that lack a share of its ids."""
    half = max(1, int(share * work.ids / 2))
    # The last ``rows`` ids are in use. Tables also keep some of the earlier ids.
    module, trained_by = make(work, device, int(1.25 * work.rows), entries)
    first = iter(range(work.rows, 1 << 60, half))
    generator = torch.Generator(device).manual_seed(0)

    def draw() -> list[Tensor]:
        begin = next(first)
        fresh = begin + torch.arange(half, device=device)
        # Evicted long ago: twice as many later ids have arrived as the tables have rows.
        back = (fresh - int(3.5 * work.rows)).clamp_(min=0)
        known = torch.randint(work.rows, (work.ids - 2 * half,), device=device, generator=generator)
        return [torch.cat([known + (begin - work.rows), back, fresh])] * work.tables

    return step_of(work, module, trained_by, draw)


CASES = {"watch": watch, "remember_evicted": remember_evicted}


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per case."""
    device = torch.device(args.device)
    work = Workload(args.tables, args.rows, args.dim, args.ids)
    for name in args.cases:
        figures = CASES[name](work, args, device)
        rounded = {
            key: float(f"{value:.4g}") if isinstance(value, float) else value
            for key, value in figures.items()
        }
        settings = {"every": args.every, "new": args.new}
        yield {"case": name, **dataclasses.asdict(work), **settings, **rounded}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tables", type=AtLeast(1), default=8)
    parser.add_argument(
        "--rows", type=AtLeast(1), default=1_000_000, help="distinct ids of a table"
    )
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--ids", type=AtLeast(1), default=1 << 18, help="of a table in a step")
    parser.add_argument("--every", type=AtLeast(1), default=100, help="steps between readings")
    parser.add_argument("--new", type=float, default=0.1, help="share of ids that full tables lack")
    parser.add_argument("--steps", type=AtLeast(1), default=50, help="of a round")
    parser.add_argument("--builds", type=AtLeast(1), default=4, help="of the tables that remember")
    parser.add_argument("--seconds", type=float, default=25, help="of a case")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out)


if __name__ == "__main__":
    main()
