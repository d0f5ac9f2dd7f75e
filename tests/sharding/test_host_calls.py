"""Work of a step on the host: calls of Python functions and of ops, compared with stock tables.

Counts don't depend on the machine. ``python -m benchmarks host_time`` has the times.
"""

from __future__ import annotations

import argparse
import collections
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.sharded_step import SIDES, draw, make_model

pytestmark = pytest.mark.compat

#: Maximum ratio to the counts of stock tables.
LIMIT = 0.6


class PythonCalls:
    """Counts calls of Python functions on this thread."""

    def __init__(self) -> None:
        self.number = 0

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        self.number += event == "call"

    def __enter__(self) -> PythonCalls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def count(_rank: int, _world_size: int, device: torch.device) -> dict[str, Any]:
    args = argparse.Namespace(
        tables=26,
        rows=200,
        dim=8,
        batch=4,
        bag=2,
        load=0.5,
        num_groups=1,
        wire_dtype="fp32",
        device=device,
    )
    counts: dict[str, Any] = {}
    for side in SIDES:
        model = make_model(args, side)
        batches = [draw(args, 0.0) for _ in range(5)]
        grad = torch.randn(args.batch, args.tables * args.dim, device=device)
        for batch in batches[:3]:
            step(model, batch, grad)
        with PythonCalls() as calls:
            step(model, batches[3], grad)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step(model, batches[4], grad)
        ops = collections.Counter(event.name for event in profiler.events() if "::" in event.name)
        counts[side] = (calls.number, ops)
    return counts


def step(model: torch.nn.Module, batch: KeyedJaggedTensor, grad: torch.Tensor) -> None:
    model(batch).values().backward(grad)


@pytest.mark.parametrize("device_type", ["cpu"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_of_a_step(run_ranks, world_size):
    for counts in run_ranks(world_size, count):
        (stock_calls, stock_ops), (calls, ops) = (counts[side] for side in SIDES)
        assert calls <= LIMIT * stock_calls
        assert ops.total() <= LIMIT * stock_ops.total()
        # One op looks up all tables and one updates them, whatever their number.
        ours = {name.partition("::")[2]: n for name, n in ops.items() if "torchrec_hkv::" in name}
        ours = {name: n for name, n in ours.items() if "Lookup" not in name}
        exchange = {"bucketize": 1, "count_ids": 1, "merge_blocks": 1} if world_size > 1 else {}
        assert ours == {"train_lookup": 1, "update_rows": 1, **exchange}
        # Counts, blocks, and rows in both directions.
        collectives = sum(n for name, n in ops.items() if name.startswith("c10d::"))
        assert collectives == (4 if world_size > 1 else 0)
