"""What of the machine each process has where pytest-xdist runs the tests in several."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch


def share(number: int, workers: int, cores: int, gpus: int) -> dict[str, str]:
    """Variables of one of the workers, which start processes of their own that have them too.

    All GPUs, as tests of several ranks need them, but each worker begins with another one.

    Args:
        number: of the worker, from 0.
        workers: how many there are.
        cores: of the machine.
        gpus: likewise.
    """
    variables = {"OMP_NUM_THREADS": str(max(1, cores // workers))}
    if gpus:
        order = ((number + at) % gpus for at in range(gpus))
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))
    return variables


def take_share(environment: MutableMapping[str, str]) -> None:
    """Sets a worker's variables and threads, but for what somebody has set.

    Before anything is done on a GPU. In a process that is no worker nothing is set.
    """
    worker = environment.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    mine = share(
        int(worker.removeprefix("gw")),
        int(environment["PYTEST_XDIST_WORKER_COUNT"]),
        os.cpu_count() or 1,
        torch.cuda.device_count(),
    )
    if "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(int(mine["OMP_NUM_THREADS"]))
    for name, value in mine.items():
        environment.setdefault(name, value)
