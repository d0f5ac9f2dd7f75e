"""Training steps with most rows in host memory, compared with FBGEMM's cached tables.

    python -m benchmarks.training_step_tiers --out benchmarks/results/training_step_tiers.csv

A step is forward, backward and optimizer. All sides keep a share ``--hbm`` of the rows, and the
row-wise states of all rows, in HBM, and train on the same predrawn ids, different in each step.
``hkv`` and ``fbgemm`` run the parts of a step one after the other. ``hkv_prefetch`` calls
``find_or_insert`` for the next batch, which fetches its rows, on one of two high-priority streams
in turn, before it pools and updates the current batch on another stream.

- ``ms`` are milliseconds per step of many back-to-back steps, without waits of the host, and
  ``single_ms`` those of a step that begins when the device is idle (not for prefetches, half of
  which would be missing).
- ``fetched`` and ``written_back`` are the group's rows per step that are copied from host memory
and
  back.
- ``link_gb_s`` is the rate per direction of the link to host memory, for simultaneous bulk copies
  between pinned memory and HBM in both directions, measured in the same run.
- ``link_ms`` is the bytes of ``fetched`` rows divided by ``link_gb_s``: the least time of the link
for
  these rows while the same number is written back. ``over_link`` is ``ms / link_ms``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import fbgemm_gpu
import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.training_step import HashTables, Workload, make_fbgemm

SIDES = ("hkv", "hkv_prefetch", "fbgemm")
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("side", "rows", "hbm_share", "power")
WARM_STEPS = 60
STEPS = 20
ROUNDS = 5
LINK_BYTES = 256 << 20


def draw_batches(work: Workload, device: torch.device) -> list[Tensor]:
    """Draws the ids of all steps, the same for each side."""
    torch.manual_seed(1)
    return [work.draw(device) for _ in range(WARM_STEPS + ROUNDS * STEPS + STEPS + 1)]


def link_gb_s() -> float:
    """Returns the rate per direction of simultaneous bulk copies in both directions, in GB/s."""
    device = torch.device("cuda")
    on_host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    in_hbm = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    other = torch.cuda.Stream()
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        other.wait_event(begin)
        in_hbm[0].copy_(on_host[0], non_blocking=True)
        with torch.cuda.stream(other):
            on_host[1].copy_(in_hbm[1], non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return LINK_BYTES / statistics.median(times) / 1e6


class Prefetched:
    """Steps whose ids are found, and whose rows are fetched, one step ahead on other streams.

    Two streams are used in turn, so that a batch is found while the last batch's rows are fetched.

    Args:
        tables: the tables.
        offsets: offsets of every batch.
    """

    def __init__(self, tables: HashTables, offsets: Tensor) -> None:
        self._tables = tables
        self._offsets = offsets
        # High priority: otherwise blocks that move rows wait until all blocks of another kernel
        # run.
        self._streams = itertools.cycle([torch.cuda.Stream(priority=-1) for _ in range(2)])
        self._ahead = None

    def find(self, ids: Tensor) -> None:
        """Finds the ids of the first batch."""
        group = self._tables.group
        stream = next(self._streams)
        with torch.cuda.stream(stream):
            pin = group.pin()
            slots = group.find_or_insert(ids, self._offsets, self._tables.batch, pin)
            self._ahead = (ids, slots, pin, stream.record_event())

    def step(self, following: Tensor, grad: Tensor) -> None:
        """Trains on the last found batch while the following batch is found."""
        ids, slots, pin, found = self._ahead
        self.find(following)
        stream = torch.cuda.current_stream()
        stream.wait_event(found)
        slots.record_stream(stream)
        tables = self._tables
        out = tables.group.pooled_lookup(
            tables.anchor, ids, self._offsets, None, slots, tables.batch, False, pin,
            tables.learning_rate,
        )  # fmt: skip
        out.backward(grad)


def step_ms(step: Callable[[], None]) -> float:
    """Returns milliseconds per step: the median over rounds of back-to-back steps."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(STEPS):
            step()
        mark.record()
    marks[-1].synchronize()
    rounds = itertools.pairwise(marks)
    return statistics.median(begin.elapsed_time(end) / STEPS for begin, end in rounds)


def single_ms(step: Callable[[], None]) -> float:
    """Returns milliseconds of a step that begins when the device is idle."""
    times = []
    for _ in range(STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def moved(tables: HashTables) -> dict[str, int]:
    """Returns the numbers of rows moved so far, in both directions."""
    counters = tables.group.counters()
    return {name: sum(t[name] for t in counters) for name in ("fetched", "written_back")}


def measure_side(side: str, work: Workload, hbm: float) -> dict[str, object]:
    """Returns milliseconds of one side, and its moved rows."""
    device = torch.device("cuda")
    offsets = torch.arange(work.tables * work.batch + 1, device=device) * work.bag
    grad = torch.randn(work.batch, work.tables * work.dim, device=device)
    batches = iter(draw_batches(work, device))
    if side == "fbgemm":
        tables = None
        forward = make_fbgemm(work, "rowwise_adagrad", device, hbm)
    else:
        tables = HashTables(work, "rowwise_adagrad", 0.9, device, hbm)
        forward = tables.forward
    torch.cuda.synchronize()
    if side == "hkv_prefetch":
        ahead = Prefetched(tables, offsets)
        ahead.find(next(batches))

    def step() -> None:
        if side == "hkv_prefetch":
            ahead.step(next(batches), grad)
        else:
            forward(next(batches), offsets).backward(grad)

    for _ in range(WARM_STEPS):
        step()
    torch.cuda.synchronize()
    before = None if tables is None else moved(tables)
    ms = step_ms(step)
    row: dict[str, object] = dict.fromkeys(
        ("single_ms", "fetched", "written_back", "link_gb_s", "link_ms", "over_link")
    )
    row = {"ms": round(ms, 3), **row}
    if tables is not None and before is not None:
        torch.cuda.synchronize()
        row |= {n: (m - before[n]) // (ROUNDS * STEPS) for n, m in moved(tables).items()}
        link = link_gb_s()
        link_ms = row["fetched"] * work.dim * 4 / link / 1e6
        row |= {"link_gb_s": round(link, 1), "link_ms": round(link_ms, 3)}
        row["over_link"] = round(ms / link_ms, 3) if link_ms else None
    if side != "hkv_prefetch":
        row["single_ms"] = round(single_ms(step), 3)
    return row


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per side."""
    work = Workload(26, args.rows // 26, 128, 8192, 10, power=args.power)
    for side in args.sides:
        common = {"side": side, "rows": args.rows, "hbm_share": args.hbm, "power": args.power}
        yield {**common, **measure_side(side, work, args.hbm), "fbgemm": fbgemm_gpu.__version__}
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=AtLeast(1), default=100_000_000, help="of all tables")
    parser.add_argument("--hbm", type=float, default=0.1, help="share of the rows in HBM")
    parser.add_argument("--power", type=float, default=1.05, help="of the ids' power law")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
