"""The ranks that a benchmark runs on: those of torchrun, or a single rank."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.environment import report


def device_of_rank(kind: str | None = None) -> torch.device:
    """Returns this rank's device. A GPU becomes the current device.

    Args:
        kind: ``"cpu"`` or ``"cuda"``; None for a GPU if there is one. A given index is kept.
    """
    device = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def joined_ranks(device: torch.device, minutes: float | None = None) -> Iterator[None]:
    """A context with the process group of all ranks: NCCL on GPUs, otherwise gloo.

    Args:
        device: this rank's device.
        minutes: timeout of waits for other ranks; PyTorch's default if None.
    """
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=None if minutes is None else datetime.timedelta(minutes=minutes),
        **alone,
    )
    try:
        yield
    finally:
        # Objects in reference cycles would keep process groups after their end here.
        gc.collect()
        dist.destroy_process_group()


def report_once(
    rows: Iterable[Mapping[str, object]], path: Path | None, keys: Sequence[str] | None = None
) -> None:
    """Reports the rows of all ranks on rank 0; returns when all ranks have measured.

    Args:
        rows: see :func:`benchmarks.environment.report`; each rank must have the same number.
        path: see :func:`benchmarks.environment.report`.
        keys: see :func:`benchmarks.environment.report`.
    """
    if dist.get_rank() == 0:
        report(rows, path, keys)
    else:
        for _ in rows:
            pass
    dist.barrier()
