"""Times of calls on a GPU (by events) or a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def median_ms(
    call: Callable[[T], object], inputs: Iterable[T], device: torch.device, warm: int = 2
) -> float:
    """Median milliseconds of ``call(input)`` over the inputs but the first ``warm``."""
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
    return statistics.median(times[warm:])


def steps_ms(step: Callable[[int], object], steps: int, device: torch.device) -> float:
    """Median milliseconds a step of five rounds of ``steps`` steps back to back, after three more.

    Args:
        step: is given its number.
        steps: of a round.
        device: where they run.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for at in range(3):
        step(at)
    times = []
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        for at in range(steps):
            step(at)
        wait()
        times.append(1000 * (time.perf_counter() - begin) / steps)
    return statistics.median(times)
