"""Runs a benchmark as ``python -m benchmarks.NAME`` does, alone or on ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from tests.support.forked import run_python


def run_benchmark(
    name: str,
    *arguments: object,
    ranks: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A benchmark's output and exit code.

    Args:
        name: name of the benchmark.
        arguments: arguments of its command line.
        ranks: number of ranks, as under torchrun; None: without variables of ranks.
        variables: environment variables beside those of this process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    command = ["-m", f"benchmarks.{name}", *map(str, arguments)]
    return run_python(command, environment, ranks)
