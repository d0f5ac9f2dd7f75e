"""The ranks that a benchmark runs on: those that torchrun started, or one alone."""

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
    """This rank's device, which is made the current one where it is a GPU.

    Args:
        kind: ``"cpu"`` or ``"cuda"``; None: a GPU where there is one. An index that comes with it
            is kept.
    """
    device = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def joined_ranks(device: torch.device, minutes: float | None = None) -> Iterator[None]:
    """The process group of all ranks: NCCL on GPUs, else gloo.

    Args:
        device: this rank's.
        minutes: that ranks wait for each other at most; by default as long as PyTorch has it.
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
        # What is in reference cycles holds process groups beyond their end here.
        gc.collect()
        dist.destroy_process_group()


def report_once(
    rows: Iterable[Mapping[str, object]], path: Path | None, keys: Sequence[str] | None = None
) -> None:
    """Has rank 0 report what all ranks measure together; returns when all have.

    Args:
        rows: as :func:`benchmarks.environment.report` takes them, equally many on each rank.
        path: likewise.
        keys: likewise.
    """
    if dist.get_rank() == 0:
        report(rows, path, keys)
    else:
        for _ in rows:
            pass
    dist.barrier()
