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
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "torchrec_hkv": __version__,
        "commit": _commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


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


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes rows, each with :func:`describe`'s columns after its own."""
    about = describe()
    rows = [{**row, **about} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
