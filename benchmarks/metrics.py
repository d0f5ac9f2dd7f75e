"""What metrics cost: training steps with and without them, in turn, in one process.

    python -m benchmarks.metrics --out benchmarks/results/metrics.csv

A step looks up ids of several tables, goes backward and updates the rows by Adagrad. ``watch``
reads the metrics of all tables every ``--every`` steps and hands them to a line of progress; its
tables hold all ids. ``remember_evicted`` counts ids that come back, in full tables into which
``--new`` of the ids of a step are new, beside equal tables that don't remember. ``without_ms`` and
``with_ms`` are medians over the rounds, of steps back to back; ``overhead`` is the median of what a
round with metrics took more than the round before it, as a share.
"""

from __future__ import annotations

import argparse
import dataclasses
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

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return 1000 * (time.perf_counter() - begin) / steps


def compare(without: Step, with_: Step, steps: int, rounds: int, device: torch.device) -> dict:
    """Rounds of both in turn, after one of each that does not count."""
    times = [
        [round_ms(step, steps, device) for step in (without, with_)] for _ in range(rounds + 1)
    ][1:]
    return {
        "without_ms": statistics.median(pair[0] for pair in times),
        "with_ms": statistics.median(pair[1] for pair in times),
        "overhead": statistics.median(pair[1] / pair[0] - 1 for pair in times),
    }


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

        return compare(step, watched, args.steps, args.rounds, device)


def remember_evicted(
    work: Workload, args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Of remembering what full tables evict."""
    new = int(args.new * work.ids)
    steps = []
    for entries in (None, work.rows):
        module, trained_by = make(work, device, int(0.9 * work.rows), entries)
        first = iter(range(work.rows, 1 << 60, max(1, new)))

        def draw(first: Iterator[int] = first) -> list[Tensor]:
            fresh = next(first) + torch.arange(new, device=device)
            known = torch.randint(work.rows, (work.ids - new,), device=device)
            return [torch.cat([known, fresh])] * work.tables

        steps.append(step_of(work, module, trained_by, draw))
    return compare(*steps, args.steps, args.rounds, device)


CASES = {"watch": watch, "remember_evicted": remember_evicted}


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row a case."""
    device = torch.device(args.device)
    work = Workload(args.tables, args.rows, args.dim, args.ids)
    for name in args.cases:
        figures = CASES[name](work, args, device)
        rounded = {key: float(f"{value:.4g}") for key, value in figures.items()}
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
    parser.add_argument("--steps", type=int, default=200, help="of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    if args.steps < args.every:
        parser.error(f"--steps is {args.steps}, but must be at least --every, {args.every}")
    report(measure(args), args.out)


if __name__ == "__main__":
    main()
