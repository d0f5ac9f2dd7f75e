"""What a benchmark row carries: where it was measured, with what, and how to measure it again."""

from __future__ import annotations

import csv
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

import torch

from torchrec_hkv import __version__

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, str]:
    """GPU (or CPU), versions, commit and command of this run."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": device,
        "cpu": _cpu_model(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "torchrec_hkv": __version__,
        "commit": _commit(),
        "command": _command(),
    }


def _command() -> str:
    """What was typed: under torchrun its command, not that of the processes that it starts."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(["python", *sys.orig_argv[1:]])
    ranks = os.environ["LOCAL_WORLD_SIZE"]
    arguments = [word for word in sys.orig_argv[1:] if word != "-u"]
    return shlex.join(["torchrun", "--nproc_per_node", ranks, *arguments])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """The commit, marked where the tree differs from it.

    A machine that has the tree without its repository is told by ``TORCHREC_HKV_COMMIT``.
    """
    if told := os.environ.get("TORCHREC_HKV_COMMIT"):
        return told
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()


class CsvFile:
    """Rows of a benchmark with :func:`describe`'s columns after their own, written as they come.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._writer: csv.DictWriter[str] | None = None

    def __enter__(self) -> CsvFile:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", newline="")
            self._about = describe()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, row: Mapping[str, object]) -> None:
        """Adds a row; all rows have the same columns."""
        if self._file is None:
            return
        row = {**row, **self._about}
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, fieldnames=list(row))
            self._writer.writeheader()
        self._writer.writerow(row)
        self._file.flush()


def report(rows: Iterable[Mapping[str, object]], path: Path | None) -> None:
    """Prints rows as they come, and writes them to a CSV file, where one is named."""
    with CsvFile(path) as file:
        for row in rows:
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            file.write(row)
