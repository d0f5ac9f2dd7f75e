"""Runs functions on the processes of a process group, and keeps the group for the next test.

Importing TorchRec takes seconds. On a CPU, ranks are therefore forked from a process that has
imported it, and all tests of a size share a group. If a function fails on a rank, the group is
ended, because other ranks may wait for this rank.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes import fork_context

# Number of newly imported modules after which objects are frozen again.
_NEW_MODULES = 50


class RankError(RuntimeError):
    """A function failed on a rank. The message is the rank's traceback."""


class Ranks:
    """Worker processes of one process group: gloo on the CPU, NCCL with one GPU each."""

    def __init__(self, world_size: int, device_type: str, host_size: int | None = None) -> None:
        """
        Args:
            world_size: number of processes.
            device_type: ``"cpu"`` or ``"cuda"``.
            host_size: number of ranks per host for TorchRec; all ranks if None.
        """
        on_gpu = device_type == "cuda"
        context = multiprocessing.get_context("spawn") if on_gpu else fork_context()
        # The store for the rendezvous already listens, because a free port may be taken by the time
        # that a rank has imported TorchRec.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    world_size,
                    host_size or world_size,
                    device_type,
                    self._store.port,
                    child_end,
                ),
                daemon=True,
            )
            process.start()
            child_end.close()
            self._connections.append(parent_end)
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        """Returns whether all processes wait for the next function."""
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ``function(rank, world_size, device, *args)`` on every rank.

        Args:
            function: a function at the top level of a module, because it is pickled by name.
            args: picklable arguments.
            timeout: seconds after which the group is ended.

        Returns:
            The results, by rank.

        Raises:
            RankError: the function failed on a rank.
            TimeoutError: a rank did not answer in time.
        """
        try:
            return self._run(function, args, timeout)
        except BaseException:  # also interrupts, because ranks may wait for each other
            self.end()
            raise

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        for connection in self._connections:
            connection.send((function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(self._connections):
            pending = [c for rank, c in enumerate(self._connections) if rank not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{len(pending)} ranks did not answer in {timeout} s.")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    is_good, result = connection.recv()
                except (EOFError, ConnectionResetError):
                    is_good, result = False, "the process ended"
                if not is_good:
                    raise RankError(f"On rank {rank}: {result}")
                results[rank] = result
        return [results[rank] for rank in range(len(self._connections))]

    def end(self) -> None:
        """Ends the processes, also if they are busy."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(
    rank: int,
    world_size: int,
    host_size: int,
    device_type: str,
    port: int,
    connection: Connection,
) -> None:
    local_rank = rank % host_size
    if device_type == "cuda" and host_size < world_size:
        # A rank only sees the GPUs of its host, numbered from 0.
        first = rank - local_rank
        visible = ",".join(str(gpu) for gpu in range(first, first + host_size))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(host_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
        device_id=device if device_type == "cuda" else None,
    )
    frozen = 0
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        if len(sys.modules) > frozen + _NEW_MODULES:
            # Later collections skip the objects of imported modules, which take .5 s per
            # collection.
            gc.collect()
            gc.freeze()
            frozen = len(sys.modules)
        try:
            result = function(rank, world_size, device, *args)
            dist.barrier()
            connection.send((True, result))
        except Exception:  # the parent raises it
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()
