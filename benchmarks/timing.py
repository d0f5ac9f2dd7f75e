"""Times calls on a GPU (with events) or a CPU."""

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
    """Returns median milliseconds of ``call(input)`` over all inputs except the first ``warm``."""
    times = []
    for item in inputs:
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # Hides the host's work, so that the events only enclose the device's work.
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
    """Returns median milliseconds per step of five rounds of ``steps`` back-to-back steps, after
    three warm-up steps.

    Args:
        step: runs the step with a given number.
        steps: number of steps per round.
        device: device of the steps.
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
