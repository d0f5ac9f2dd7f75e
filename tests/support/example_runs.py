"""Runs an example like a user, on small synthetic logs or, if available, real logs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import run_python, running

ROOT = Path(__file__).resolve().parents[2]
_SHARED = ROOT.parent / "shared" / "data"


def run_example(
    name: str, *arguments: object, processes: int | None = None, device: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    """Runs an example; returns its output and exit code.

    Args:
        name: name of its file.
        arguments: command-line arguments.
        processes: number of processes under torchrun; None without torchrun.
        device: ``"cpu"`` or ``"cuda"``.
    """
    if device == "cpu":
        command = [str(ROOT / "examples" / name), "--device", device, *map(str, arguments)]
        return run_python(command, _environment(), processes)
    return subprocess.run(
        _command(name, arguments, processes, device),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )


def kill_example(name: str, *arguments: object, processes: int, once: Path) -> None:
    """Starts an example on CPUs, and kills its ranks by SIGKILL as soon as a file exists."""
    command = [str(ROOT / "examples" / name), "--device", "cpu", *map(str, arguments)]
    nowhere = Path(os.devnull)
    with running(command, _environment(), processes, nowhere, nowhere) as ranks:
        while not once.exists():
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.01)


def _command(
    name: str, arguments: Sequence[object], processes: int | None, device: str
) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    example = [str(ROOT / "examples" / name), "--device", device, *map(str, arguments)]
    return [sys.executable, *(launcher if processes else []), *example]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def refusal(name: str, *arguments: object) -> str:
    """Returns the error of an example with bad input."""
    done = run_example(name, *arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def shared_file(name: str) -> Path:
    """Returns a file of real data; skips the test if it is missing."""
    path = _SHARED / name
    if not path.is_file():
        pytest.skip(f"{name} is not here")
    return path


def write_ratings(path: Path, rows: int = 4000, users: int = 120, movies: int = 80) -> Path:
    """Writes ratings of 28 days in MovieTweetings' format; some movies are liked and others not."""
    random = np.random.default_rng(0)
    seconds = np.sort(random.integers(28 * 86400, size=rows)) + 1_360_000_000
    # Ids are drawn from a moving window, so that they arrive and leave.
    user = random.integers(users // 2, size=rows) + np.arange(rows) * (users // 2) // rows
    movie = random.integers(movies, size=rows)
    liked = random.random(rows) < np.where(movie % 2 == 0, 0.85, 0.15)
    lines = [
        f"{u}::{m}::{9 if like else 3}::{s}"
        for u, m, like, s in zip(user, movie, liked, seconds, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def criteo_lines(rows: int = 2000) -> list[str]:
    """Creates Criteo's text format. Clicks depend on the first id; some fields are missing."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(rows):
        kind = int(random.integers(50))
        click = int(random.random() < (0.8 if kind % 2 else 0.1))
        counts = [str(random.integers(-1, 100)) if random.random() < 0.8 else "" for _ in range(13)]
        ids = [f"{kind * 7919:08x}"]
        ids += [f"{random.integers(1 << 32):08x}", ""]
        ids += [f"{random.integers(20):08x}" for _ in range(23)]
        lines.append("\t".join([str(click), *counts, *ids]))
    return lines
