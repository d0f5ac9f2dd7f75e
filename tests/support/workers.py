"""The share of the machine that each worker of pytest-xdist gets."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch


def share(number: int, workers: int, cores: int, gpus: int) -> dict[str, str]:
    """Returns the environment variables of a worker, which its child processes inherit.

    Each worker has all GPUs, because tests with several ranks need them, but begins with another
    one.

    Args:
        number: number of the worker, from 0.
        workers: number of workers.
        cores: number of cores of the machine.
        gpus: number of GPUs of the machine.
    """
    variables = {"OMP_NUM_THREADS": str(max(1, cores // workers))}
    if gpus:
        order = ((number + at) % gpus for at in range(gpus))
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))
    return variables


def take_share(environment: MutableMapping[str, str]) -> None:
    """Sets a worker's variables and threads, except those that are already set.

    Must be called before the GPU is used. Does nothing in a process that is not a worker.
    """
    worker = environment.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    worker_share = share(
        int(worker.removeprefix("gw")),
        int(environment["PYTEST_XDIST_WORKER_COUNT"]),
        os.cpu_count() or 1,
        torch.cuda.device_count(),
    )
    if "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(int(worker_share["OMP_NUM_THREADS"]))
    for name, value in worker_share.items():
        environment.setdefault(name, value)
