"""Times of calls on a GPU (by events) or a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def median_ms(call: Callable[[T], object], inputs: Iterable[T], device: torch.device) -> float:
    """Median milliseconds of ``call(input)`` over the inputs; the first two calls are warm-up."""
    times = []
    for item in inputs:
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # Work that hides the host's part: the events then enclose the device's alone.
            torch.cuda._sleep(1_000_000)
            begin.record()
            call(item)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            begin_s = time.perf_counter()
            call(item)
            times.append(1000 * (time.perf_counter() - begin_s))
    return statistics.median(times[2:])
