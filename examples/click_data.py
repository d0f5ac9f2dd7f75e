"""Click logs for the examples: who saw what, when, and whether they liked it.

Reads MovieLens-100K from the ``recbole`` wheel (or its ``.inter`` file), MovieTweetings (``.dat``),
and Criteo's logs: the published text files (of the Kaggle challenge and the terabyte log, gzipped
or not) and arrays (``.npz``). Each becomes a :class:`ClickLog` in order of time.
"""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import criteo_text
import numpy as np

MOVIELENS_MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
SECONDS_A_DAY = 86400
# A Criteo column with more distinct values than this goes to a hash table.
MANY_IDS = 1000


class DataError(Exception):
    """An error in the user's input; its message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One categorical column.

    Attributes:
        name: name of the column and of its table.
        ids: int64 ``[rows]``; any values.
        present: bool ``[rows]``; a row without a value has an empty bag.
        open_ended: whether new ids keep arriving, so the set of ids can't be known in advance.
    """

    name: str
    ids: np.ndarray
    present: np.ndarray
    open_ended: bool


@dataclasses.dataclass(frozen=True)
class ClickLog:
    """Rows in order of time.

    Attributes:
        name: name of the data set.
        labels: float32 ``[rows]``, 0 or 1.
        dense: float32 ``[rows, features]``.
        columns: the categorical columns.
        seconds: int64 ``[rows]``, the time of each row; None if unknown.
    """

    name: str
    labels: np.ndarray
    dense: np.ndarray
    columns: list[Column]
    seconds: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, rows: int) -> ClickLog:
        """Returns the first rows of the log."""
        columns = [
            dataclasses.replace(c, ids=c.ids[:rows], present=c.present[:rows]) for c in self.columns
        ]
        return dataclasses.replace(
            self,
            labels=self.labels[:rows],
            dense=self.dense[:rows],
            columns=columns,
            seconds=None if self.seconds is None else self.seconds[:rows],
        )


def mix64(ids: np.ndarray) -> np.ndarray:
    """Spreads ids over the int64 range by a bijection (SplitMix64's finaliser)."""
    x = ids.astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def read(path: Path, limit: int | None = None) -> ClickLog:
    """Reads a click log; the format follows from the file's name.

    Args:
        path: path of the file.
        limit: number of earliest rows to keep; all by default.

    Raises:
        DataError: the file is missing, or has another format than its name says.
    """
    readers = {
        ".whl": read_movielens_wheel,
        ".inter": read_movielens,
        ".dat": read_movietweetings,
        ".npz": read_criteo,
    }
    if not path.is_file():
        raise DataError(f"There is no data file {path}.")
    if path.suffix in criteo_text.SUFFIXES:
        log = criteo_log(*criteo_text.read(path, limit, DataError))
    elif path.suffix in readers:
        try:
            log = readers[path.suffix](path)
        except UnicodeDecodeError:
            raise DataError(f"{path.name} is no text file, as its name says.") from None
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}.") from None
    else:
        known = sorted({*readers, *filter(None, criteo_text.SUFFIXES)})
        raise DataError(f"{path.name} is of an unknown format; known are {', '.join(known)}.")
    return log if limit is None else log.first(limit)


def read_movielens_wheel(path: Path) -> ClickLog:
    try:
        with zipfile.ZipFile(path) as wheel:
            text = wheel.read(MOVIELENS_MEMBER).decode()
    except (zipfile.BadZipFile, KeyError, EOFError):
        raise DataError(f"{path.name} is not a wheel with {MOVIELENS_MEMBER} in it.") from None
    return parse_movielens(path.name, text)


def read_movielens(path: Path) -> ClickLog:
    return parse_movielens(path.name, path.read_text())


def parse_movielens(file_name: str, text: str) -> ClickLog:
    header, *lines = text.splitlines() or [""]
    expected = ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]
    if header.split("\t") != expected:
        raise DataError(f"{file_name} must have the columns {', '.join(expected)}.")
    rows = parse_rows(file_name, lines, separator="\t")
    return ratings("MovieLens-100K", rows, liked_from=4)


def read_movietweetings(path: Path) -> ClickLog:
    rows = parse_rows(path.name, path.read_text().splitlines(), separator="::")
    return ratings("MovieTweetings", rows, liked_from=8)


def parse_rows(file_name: str, lines: list[str], separator: str) -> np.ndarray:
    """Returns int64 ``[rows, 4]``: user, movie, rating, seconds."""
    if not lines:
        raise DataError(f"{file_name} holds no rows.")
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.split(separator)
        try:
            if len(words) != 4:
                raise ValueError
            rows.append(np.array([int(word) for word in words], dtype=np.int64))
        except (ValueError, OverflowError):
            raise DataError(
                f"{file_name} must have four numbers a row (user, movie, rating, seconds),"
                f" and row {number} is '{line[:60]}'."
            ) from None
    return np.stack(rows)


def ratings(name: str, rows: np.ndarray, liked_from: int) -> ClickLog:
    """Creates a log of ratings. Users and movies are open-ended, the hour of day is not."""
    user, movie, rating, seconds = rows[np.argsort(rows[:, 3], kind="stable")].T
    hour = seconds % SECONDS_A_DAY // 3600
    # Encodes the hour of the day and the day of the week as points on circles.
    day_angle = 2 * np.pi * (seconds % SECONDS_A_DAY) / SECONDS_A_DAY
    week_angle = 2 * np.pi * (seconds // SECONDS_A_DAY % 7) / 7
    angles = [np.sin(day_angle), np.cos(day_angle), np.sin(week_angle), np.cos(week_angle)]
    always = np.ones(len(rows), dtype=bool)
    return ClickLog(
        name=name,
        labels=(rating >= liked_from).astype(np.float32),
        dense=np.stack(angles, axis=1).astype(np.float32),
        columns=[
            Column("user", mix64(user), always, open_ended=True),
            Column("movie", mix64(movie), always, open_ended=True),
            Column("hour", hour, always, open_ended=False),
        ],
        seconds=seconds,
    )


def read_criteo(path: Path) -> ClickLog:
    shapes = {"label": (), "dense": (13,), "cat": (26,)}
    try:
        with np.load(path) as file:
            label, dense, cat = (file[key] for key in shapes)
    except (KeyError, IndexError, TypeError, ValueError, OSError, EOFError, zipfile.BadZipFile):
        raise DataError(f"{path.name} must hold the arrays {', '.join(shapes)}.") from None
    rows = label.shape[0] if label.ndim else 0
    for (key, shape), array in zip(shapes.items(), (label, dense, cat), strict=True):
        if array.shape != (rows, *shape):
            raise DataError(
                f"{path.name}: '{key}' must be of shape {(rows, *shape)}, not {array.shape}."
            )
        if array.dtype.kind not in ("iu" if key == "cat" else "iuf"):
            raise DataError(f"{path.name}: '{key}' must hold numbers, not {array.dtype}.")
    if rows == 0:
        raise DataError(f"{path.name} holds no rows.")
    return criteo_log(label, dense, cat)


def criteo_log(label: np.ndarray, dense: np.ndarray, cat: np.ndarray) -> ClickLog:
    """Creates a log of Criteo's columns, in which -1 is a missing id."""
    # Counts have a long tail; missing counts become 0.
    dense = np.log1p(np.maximum(np.nan_to_num(dense), 0))
    columns = []
    for i in range(cat.shape[1]):
        ids = cat[:, i].astype(np.int64)
        present = ids != -1
        many = len(np.unique(ids[present])) > MANY_IDS
        columns.append(Column(f"cat_{i}", mix64(ids) if many else ids, present, open_ended=many))
    return ClickLog("Criteo", label.astype(np.float32), dense.astype(np.float32), columns)
