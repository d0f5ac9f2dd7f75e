"""Logs of ids: samples in order of time, read in parts."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor


class LogError(ValueError):
    """A log can't be read."""


@dataclasses.dataclass(frozen=True)
class Ids:
    """Ids of one column, in a part of a log.

    Attributes:
        values: int64 ``[n]``.
        samples: int64 ``[n]``, ascending: the sample of each id, from 0 in each part. None: every
            sample has one id.
    """

    values: Tensor
    samples: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """Successive samples of a log.

    Attributes:
        num_samples: number of samples.
        columns: ids by column name.
    """

    num_samples: int
    columns: dict[str, Ids]


class Log(abc.ABC):
    """Samples in order of time; each has an id, none, or several in each column.

    Attributes:
        name: name of the log in messages.
        columns: columns that can be read as ids.
        default_columns: columns that are replayed by default.
        ordered_columns: columns that the log can be sorted by.
        is_repeatable: whether the log can be read more than once.
    """

    name: str
    columns: tuple[str, ...]
    is_repeatable = True

    @property
    def default_columns(self) -> tuple[str, ...]:
        return self.columns

    @property
    def ordered_columns(self) -> tuple[str, ...]:
        """Columns that the log can be sorted by: numbers, not texts, whose ids are hashes."""
        return self.columns

    @abc.abstractmethod
    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        """Yields the parts of the log from its beginning.

        Args:
            columns: columns to read.

        Raises:
            LogError: the log is damaged.
        """

    def check(self, columns: Sequence[str]) -> None:
        """Checks that the log has columns.

        Raises:
            LogError: a column is missing. The message names those of the log.
        """
        for column in columns:
            if column not in self.columns:
                raise LogError(
                    f"{self.name} has no column of ids {column!r}; it has "
                    f"{', '.join(self.columns) or 'none'}."
                )


class JoinedLog(Log):
    """Several logs in sequence, such as the files of successive days."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self._logs = tuple(logs)
        first = self._logs[0]
        self.name, self.columns = first.name, first.columns
        self._default_columns = first.default_columns
        self.is_repeatable = all(log.is_repeatable for log in logs)

    @property
    def default_columns(self) -> tuple[str, ...]:
        return self._default_columns

    @property
    def ordered_columns(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in self._logs[0].ordered_columns
            if all(name in log.ordered_columns for log in self._logs)
        )

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        for log in self._logs:
            yield from log.parts(columns)

    def check(self, columns: Sequence[str]) -> None:
        for log in self._logs:
            log.check(columns)


class SortedLog(Log):
    """A log that is sorted by a column, in memory.

    Args:
        log: a log with one id for each sample in every column that is read.
        by: column to sort by. Samples with equal values keep their order.

    Raises:
        LogError: the log has no such column, or its values have no order.
    """

    def __init__(self, log: Log, by: str) -> None:
        if by not in log.ordered_columns:
            log.check([by])
            raise LogError(
                f"{log.name} can't be sorted by {by!r}, which is not a column of integers: convert "
                "its times to integers."
            )
        self._log, self._by = log, by
        self.name, self.is_repeatable = log.name, log.is_repeatable
        self.columns = log.columns

    @property
    def default_columns(self) -> tuple[str, ...]:
        return tuple(name for name in self._log.default_columns if name != self._by)

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        read = list(dict.fromkeys([*columns, self._by]))
        parts = list(self._log.parts(read))
        if not parts:
            return
        for name in read:
            if any(part.columns[name].samples is not None for part in parts):
                raise LogError(
                    f"{self.name}: column {name!r} has samples with no id or several, but "
                    "a log that is sorted must have one id in each."
                )
        values = {name: torch.cat([part.columns[name].values for part in parts]) for name in read}
        order = torch.argsort(values[self._by], stable=True)
        yield Part(order.numel(), {name: Ids(values[name][order]) for name in columns})

    def check(self, columns: Sequence[str]) -> None:
        self._log.check(columns)


class WithoutMissing(Log):
    """A log in which one value marks a missing id."""

    def __init__(self, log: Log, missing: int) -> None:
        self._log, self._missing = log, missing
        self.name, self.columns = log.name, log.columns
        self.is_repeatable = log.is_repeatable

    @property
    def default_columns(self) -> tuple[str, ...]:
        return self._log.default_columns

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        for part in self._log.parts(columns):
            present = {name: self._present(ids) for name, ids in part.columns.items()}
            yield Part(part.num_samples, present)

    def _present(self, ids: Ids) -> Ids:
        present = ids.values != self._missing
        if bool(present.all()):
            return ids
        at = present.nonzero().squeeze(1)
        return Ids(ids.values[at], at if ids.samples is None else ids.samples[at])

    def check(self, columns: Sequence[str]) -> None:
        self._log.check(columns)


def check_file(path: Path) -> None:
    """Checks that a path is a file.

    Raises:
        LogError: the path does not exist, or is a folder.
    """
    if not path.exists():
        raise LogError(f"There is no log {path}.")
    if not path.is_file():
        raise LogError(f"{path} is not a file: name the log's files.")
