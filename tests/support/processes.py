"""Forks processes from a process that has imported TorchRec, because the import takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch


def fork_context() -> ForkServerContext:
    """Returns the context that forks processes from a server of this process. CPU only, because a
    process that has initialized CUDA can't fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    # The server imports packages that look for GPUs, after which its processes can't use CUDA. So
    # the GPUs are hidden from them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        multiprocessing.forkserver.ensure_running()
    return context


def run_python(
    command: Sequence[str],
    environment: Mapping[str, str],
    processes: int | None = None,
    timeout: float = 280.0,
    folder: Path | None = None,
    missing: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs ``python COMMAND``, or ``torchrun COMMAND`` for several processes, without the time of
    importing TorchRec. Functions of :mod:`atexit` are called at the end.

    Args:
        command: a script, or ``"-m"`` and a module, and their arguments.
        environment: all environment variables.
        processes: number of ranks; None to set no variables of ranks.
        timeout: seconds after which the processes are killed.
        folder: working directory; None for the current one.
        missing: packages that can't be imported.

    Returns:
        Exit code, as of torchrun if there are ranks, and output of all processes.

    Raises:
        subprocess.TimeoutExpired: a process did not end in time.
    """
    with tempfile.TemporaryDirectory() as told:
        output, errors = Path(told, "output"), Path(told, "errors")
        started = running(command, environment, processes, output, errors, folder, missing)
        with started as ranks:
            _wait(ranks, command, timeout)
        codes = [process.exitcode for process in ranks]
        code = codes[0] if processes is None else int(any(codes))
        return subprocess.CompletedProcess([*command], code, output.read_text(), errors.read_text())


@contextlib.contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    processes: int | None,
    output: Path,
    errors: Path,
    folder: Path | None = None,
    missing: Sequence[str] = (),
) -> Iterator[list[BaseProcess]]:
    """Starts the processes of :func:`run_python`, and kills them at the end.

    Args:
        output: file for their standard output.
        errors: file for their standard error.
    """
    context = fork_context()
    ranks: list[BaseProcess] = []
    try:
        for variables in _rank_variables(processes):
            variables_of_process = {**environment, **variables}
            arguments = (
                list(command),
                variables_of_process,
                output,
                errors,
                folder or Path.cwd(),
                missing,
            )
            process = context.Process(target=_run, args=arguments)
            process.start()
            ranks.append(process)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()


def _rank_variables(processes: int | None) -> list[dict[str, str]]:
    if processes is None:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(processes)
    ]


def _wait(running: list[BaseProcess], command: Sequence[str], timeout: float) -> None:
    """Waits until all processes have ended, or one has failed."""
    pending, deadline = list(running), time.monotonic() + timeout
    while pending:
        ready = multiprocessing.connection.wait(
            [process.sentinel for process in pending], max(0.0, deadline - time.monotonic())
        )
        if not ready:
            raise subprocess.TimeoutExpired([*command], timeout)
        for process in pending:
            if process.sentinel in ready:
                process.join()
        if any(process.exitcode for process in pending if process.sentinel in ready):
            return
        pending = [process for process in pending if process.sentinel not in ready]


def _run(
    command: list[str],
    environment: dict[str, str],
    output: Path,
    errors: Path,
    folder: Path,
    missing: Sequence[str],
) -> None:
    for path, stream in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    sys.orig_argv = [sys.executable, *command]
    sys.modules.update(dict.fromkeys(missing))  # with None, an import raises ImportError
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    code = 0
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # like the interpreter
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # a forked process does not call them
    sys.exit(code)
