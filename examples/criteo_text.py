"""Criteo's published text files. A line has a label, 13 counts and 26 ids, separated by tabs.

The Kaggle challenge (``train.txt``) and the terabyte log (``day_0`` to ``day_23``, ``.gz``) have
the same format: the label is 0 or 1; counts are decimal numbers, which may be negative or missing;
ids are eight hexadecimal digits, which may be missing.
"""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np

SUFFIXES = (".txt", ".tsv", ".gz", "")
COUNTS, IDS = 13, 26
MISSING = -1
# Largest number of digits of an id. Published ids have eight; more than fifteen may exceed int64.
MAX_DIGITS = 15


def read(
    path: Path, limit: int | None, error: type[Exception]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads a file.

    Args:
        path: path of the file.
        limit: number of lines to read; all by default.
        error: type of the exception for a file of another format.

    Returns:
        Labels float32 ``[rows]``, counts float32 ``[rows, 13]`` with NaN for missing counts, and
        ids int64 ``[rows, 26]`` with -1 for missing ids.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    labels, counts, ids = [], [], []
    try:
        with opened(path, "rt", encoding="ascii") as file:
            for number, line in enumerate(itertools.islice(file, limit), start=1):
                fields = line.rstrip("\n").split("\t")
                try:
                    if len(fields) != 1 + COUNTS + IDS:
                        raise ValueError
                    if max(map(len, fields[1 + COUNTS :])) > MAX_DIGITS:
                        raise ValueError
                    labels.append({"0": 0.0, "1": 1.0}[fields[0]])
                    counts.append([float(f) if f else np.nan for f in fields[1 : 1 + COUNTS]])
                    ids.append([int(f, 16) if f else MISSING for f in fields[1 + COUNTS :]])
                except (KeyError, ValueError):
                    raise error(
                        f"{path.name} must have a label, {COUNTS} counts and {IDS} hexadecimal ids"
                        f" a row, separated by tabs, and row {number} is '{line.rstrip()[:60]}'."
                    ) from None
    except (OSError, UnicodeDecodeError, EOFError):
        raise error(f"{path.name} is no text file, or no gzip file, as its name says.") from None
    if not labels:
        raise error(f"{path.name} holds no rows.")
    return (
        np.array(labels, dtype=np.float32),
        np.array(counts, dtype=np.float32),
        np.array(ids, dtype=np.int64),
    )
