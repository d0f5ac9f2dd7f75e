"""Runs a benchmark like ``python -m benchmarks.NAME``, in one process or on ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from tests.support.processes import run_python


def run_benchmark(
    name: str,
    *arguments: object,
    ranks: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark; returns its output and exit code.

    Args:
        name: name of the benchmark.
        arguments: command-line arguments.
        ranks: number of ranks, as under torchrun; None to set no variables of ranks.
        variables: additional environment variables.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    command = ["-m", f"benchmarks.{name}", *map(str, arguments)]
    return run_python(command, environment, ranks)
