"""What metrics cost: training steps with and without them, in turn, in one process.

    python -m benchmarks.metrics --out benchmarks/results/metrics.csv

A step looks up ids of several tables, goes backward and updates the rows by Adagrad. ``watch``
reads the metrics of all tables every ``--every`` steps and hands them to a line of progress; its
tables hold all ids. ``remember_evicted`` counts ids that come back, in full tables into which
``--new`` of the ids of a step are new, beside equal tables that don't remember and are asked for
the same ids.

A pair is a round of steps with and one without, back to back, the first of them in turn; a round
is timed from its first step to the end of its last on the device. So what drifts slower than a
pair is in both. ``without_ms`` and ``with_ms`` are medians over the rounds, milliseconds a step;
``overhead`` is the median over the pairs of what the steps with took more, as a share;
``overhead_low`` and ``overhead_high`` bound it with a probability of 95 % by bootstrap.
Pairs are measured for ``--seconds`` a case.
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

from benchmarks.environment import report
from torchrec_hkv import HKVAdagrad, MultiTableHKVEmbedding
from torchrec_hkv.metrics import ConsoleLine, Watch

Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables of one shape, and what is looked up in a step.

    Attributes:
        tables: how many.
        rows: distinct ids of each.
        dim: of a row.
        ids: of a table in a step.
    """

    tables: int
    rows: int
    dim: int
    ids: int


def make(
    work: Workload, device: torch.device, capacity: int, remember_evicted: int | None = None
) -> tuple[MultiTableHKVEmbedding, torch.optim.Optimizer]:
    """Tables that hold the ids from 0 on, as many as they have room for."""
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
    """A training step."""
    grads = [torch.randn(work.ids, work.dim, device=module.device)] * work.tables

    def step() -> None:
        torch.autograd.backward(module(draw()), grads)
        trained_by.step()
        trained_by.zero_grad()

    return step


def round_ms(step: Step, steps: int, device: torch.device) -> float:
    """Milliseconds a step of steps back to back."""
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


def compare(
    without: Step, with_: Step, steps: int, seconds: float, device: torch.device
) -> dict[str, float]:
    """Pairs of rounds, after two that do not count; at least two."""
    for step in (without, with_) * 2:
        round_ms(step, steps, device)
    pairs: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()  # a collection would fall into one of the two
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
    overheads = [with_ms / without_ms - 1 for without_ms, with_ms in pairs]
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
    """Where the median of values lies with a probability of ``share``.

    Args:
        values: independent of each other.
        share: between 0 and 1.
        draws: samples with replacement, as many values each.
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    outside = int((1 - share) / 2 * draws)
    return medians[outside], medians[draws - 1 - outside]


def watch(work: Workload, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Of reading metrics every so many steps."""
    module, trained_by = make(work, device, int(work.rows / 0.8))
    batches = [
        [torch.randint(work.rows, (work.ids,), device=device) for _ in range(work.tables)]
        for _ in range(4)
    ]
    at = iter(range(1 << 60))
    step = step_of(work, module, trained_by, lambda: batches[next(at) % 4])
    with (
        ConsoleLine("benchmark", shown=False) as line,
        Watch(module, args.every, [line]) as watching,
    ):

        def watched() -> None:
            step()
            watching.step()

        return compare(step, watched, args.steps, args.seconds, device)


def remember_evicted(
    work: Workload, args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Of remembering what full tables evict."""
    new = int(args.new * work.ids)
    steps = []
    for entries in (None, work.rows):
        module, trained_by = make(work, device, int(0.9 * work.rows), entries)
        first = iter(range(work.rows, 1 << 60, max(1, new)))
        generator = torch.Generator(device).manual_seed(0)

        def draw(
            first: Iterator[int] = first, generator: torch.Generator = generator
        ) -> list[Tensor]:
            fresh = next(first) + torch.arange(new, device=device)
            known = torch.randint(work.rows, (work.ids - new,), device=device, generator=generator)
            return [torch.cat([known, fresh])] * work.tables

        steps.append(step_of(work, module, trained_by, draw))
    return compare(*steps, args.steps, args.seconds, device)


CASES = {"watch": watch, "remember_evicted": remember_evicted}


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row a case."""
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
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1_000_000, help="distinct ids of a table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=1 << 16, help="of a table in a step")
    parser.add_argument("--every", type=int, default=100, help="steps between readings")
    parser.add_argument("--new", type=float, default=0.1, help="share of new ids, when evicting")
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--seconds", type=float, default=25, help="of a case")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    if args.steps % args.every:
        parser.error(f"--steps is {args.steps}, but must be a multiple of --every, {args.every}")
    report(measure(args), args.out)


if __name__ == "__main__":
    main()
