"""How long the growth of a hash table on a CPU interrupts training.

    python -m benchmarks.growth --out benchmarks/results/growth.csv

A table is filled until it is about to double. Then it is trained with batches that have a share of
new ids, until some steps after it has doubled. ``before_ms`` is the median time of the last steps
before it grows; ``growing_ms`` and ``growing_most_ms`` are the median and the longest time of steps
that split buckets, and ``growing_steps`` is their number; ``after_ms`` is the median of some later
steps. ``at_once_ms`` is the time of ``reserve``, which doubles an equal table in one call.
``stop_steps`` is (``growing_most_ms`` - ``before_ms``) / ``before_ms``: the longest interruption in
units of a step's time.

Before the measurement, four times the table's additional memory is written and freed, because the
host of a virtual machine may need ten times the time of these steps to provide memory for the first
time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec

#: Ids per call that fills the table.
_FILL = 1 << 18
#: Number of steps before and after the growth.
_STEPS = 7


class _Training:
    """A table that is trained with ids in order of arrival."""

    def __init__(self, args: argparse.Namespace) -> None:
        spec = TableSpec("t", 2 * args.rows, args.dim, "lru", initial_capacity=args.rows)
        self.group = TableGroup([spec], [0], RowWiseAdagrad(), "cpu")
        self.known = 0

    def step(self, new: int, old: int) -> float:
        """Trains new and old ids; returns milliseconds."""
        order = torch.cat(
            [torch.arange(self.known, self.known + new), torch.randint(max(1, self.known), (old,))]
        )
        ids = hashed(order[torch.randperm(new + old)])
        self.known += new
        anchor = torch.empty(0, requires_grad=True)
        offsets = torch.arange(ids.numel() + 1)
        begin = time.perf_counter()
        out = self.group.train_lookup(
            anchor, ids, offsets, None, ids.numel(), False, torch.tensor(0.1)
        )
        out.backward(torch.ones_like(out))
        return 1000 * (time.perf_counter() - begin)

    def fill(self, entries: int) -> None:
        while self.known < entries:
            self.step(min(_FILL, entries - self.known), 0)


def _touch_memory(args: argparse.Namespace) -> None:
    """Writes and frees four times the memory of the slots, in huge pages like a table's memory."""
    torch.ops.torchrec_hkv.serving_memory(4 * args.rows * 4 * (args.dim + 4)).fill_(1)


def _at_once(args: argparse.Namespace) -> float:
    training = _Training(args)
    slots = training.group.present_slots(0)
    training.fill(slots * 7 // 8)
    _touch_memory(args)
    begin = time.perf_counter()
    training.group.reserve(0, slots)
    passed = 1000 * (time.perf_counter() - begin)
    assert training.group.present_slots(0) == 2 * slots
    return passed


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    at_once = _at_once(args)
    for share in args.new:
        training = _Training(args)
        group, new = training.group, max(1, int(share * args.ids))
        slots = group.present_slots(0)
        training.fill(slots * 7 // 8 - (_STEPS + 1) * new)
        _touch_memory(args)
        before, growing, after = [], [], []
        while len(after) < _STEPS:
            growths = group.growths
            passed = training.step(new, args.ids - new)
            if group.growths > growths:
                growing.append(passed)
            else:
                (after if growing else before).append(passed)
        step = statistics.median(before[1:])
        yield {
            "rows": args.rows,
            "dim": args.dim,
            "ids": args.ids,
            "new": share,
            "before_ms": round(step, 2),
            "growing_ms": round(statistics.median(growing), 2),
            "growing_most_ms": round(max(growing), 2),
            "after_ms": round(statistics.median(after), 2),
            "stop_steps": round((max(growing) - step) / step, 2),
            "growing_steps": len(growing),
            "at_once_ms": round(at_once, 1),
        }


def main(arguments: list[str] | None = None) -> None:
    """Measures one table with several shares of new ids."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=AtLeast(1), default=10**7, help="slots before it doubles")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--ids", type=AtLeast(1), default=1 << 16, help="of a step")
    parser.add_argument("--new", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--threads", type=AtLeast(1), default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    report(_rows(args), args.out)


if __name__ == "__main__":
    main()
