"""Columns of all benchmark rows: device, versions, commit and command of the run."""

from __future__ import annotations

import csv
import io
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from torchrec_hkv import __version__
from torchrec_hkv.text_files import replace_text

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, str]:
    """Returns GPU (or CPU), versions, commit and command of this run."""
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
    """Returns the command that the user typed, which under torchrun is torchrun's."""
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
    """Returns the commit, with a mark if the tree differs from it.

    ``TORCHREC_HKV_COMMIT`` sets it on a machine that has the tree without its repository.
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
    """Writes rows of a benchmark, with the columns of :func:`describe`, as they arrive.

    Args:
        path: the file; None writes nothing.
        keys: columns that identify a case. Existing rows of the file are kept, except rows with the
            same key on the same device, which are replaced, so that a run may measure some cases.
            None: the file is overwritten.
    """

    def __init__(self, path: Path | None, keys: Sequence[str] | None = None) -> None:
        self._path = path
        self._keys = None if keys is None else (*keys, "device")
        self._rows: list[dict[str, str]] = []

    def __enter__(self) -> CsvFile:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._about = describe()
            if self._keys is not None and self._path.exists():
                with self._path.open(newline="") as file:
                    self._rows = list(csv.DictReader(file))
            else:
                self._path.write_text("")  # a run may have no rows
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, row: Mapping[str, object]) -> None:
        """Adds a row; all rows of a run have the same columns."""
        if self._path is None:
            return
        # Formatted as in the file, for comparison with rows of the file.
        new = {
            name: "" if value is None else str(value)
            for name, value in {**row, **self._about}.items()
        }
        self._rows = [*self._rows, new]
        if self._keys is not None:
            *rest, _ = self._rows
            places = [at for at, old in enumerate(rest) if self._key(old) == self._key(new)]
            if places:
                self._rows = rest
                self._rows[places[0]] = new
        # Columns that only old rows have come last.
        names = list(dict.fromkeys([*new, *(name for old in self._rows for name in old)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=names, restval="")
        writer.writeheader()
        writer.writerows(self._rows)
        replace_text(self._path, text.getvalue())

    def _key(self, row: Mapping[str, str]) -> tuple[str | None, ...]:
        return tuple(row.get(name) for name in self._keys or ())


def report(
    rows: Iterable[Mapping[str, object]], path: Path | None, keys: Sequence[str] | None = None
) -> None:
    """Prints rows as they arrive, and writes them to a CSV file if there is a path.

    Args:
        rows: rows of one run.
        path: see :class:`CsvFile`.
        keys: see :class:`CsvFile`.
    """
    with CsvFile(path, keys) as file:
        for row in rows:
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            file.write(row)
