"""Histories of users: the items that each user chose, in order of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from click_data import ClickLog, DataError


@dataclasses.dataclass(frozen=True)
class Events:
    """Choices in order of time: int64 ``[n]`` each.

    Attributes:
        users: user numbers, from 0.
        items: item ids, any int64.
        position: number of earlier choices of the same user.
        by_user: indices of the choices of each user, in order of time, one user after the other.
        start: begin of each user in ``by_user``, and the end.
    """

    users: np.ndarray
    items: np.ndarray
    position: np.ndarray
    by_user: np.ndarray
    start: np.ndarray

    @classmethod
    def of(cls, log: ClickLog) -> Events:
        """Takes all ratings of a log.

        Raises:
            DataError: the log has no users and movies.
        """
        columns = {column.name: column for column in log.columns}
        if not {"user", "movie"} <= set(columns):
            raise DataError(f"{log.name} has no users and movies: name a file of ratings.")
        _, users, counts = np.unique(columns["user"].ids, return_inverse=True, return_counts=True)
        by_user = np.argsort(users, kind="stable")
        start = np.concatenate([[0], counts.cumsum()])
        position = np.empty(len(users), dtype=np.int64)
        position[by_user] = np.arange(len(users)) - np.repeat(start[:-1], counts)
        return cls(users, columns["movie"].ids, position, by_user, start)

    def __len__(self) -> int:
        return len(self.users)

    def last(self, event: int, length: int) -> np.ndarray:
        """Returns at most ``length`` last items of an event's user before the event."""
        end = self.start[self.users[event]] + self.position[event]
        begin = max(self.start[self.users[event]], end - length)
        return self.items[self.by_user[begin:end]]


@dataclasses.dataclass(frozen=True)
class Histories:
    """A batch of histories.

    Attributes:
        items: items of all histories, int64 ``[n]``.
        lengths: lengths of the histories, int64 ``[histories]``.
    """

    items: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> Histories:
        """Concatenates histories."""
        items = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return cls(torch.from_numpy(items), torch.tensor([len(part) for part in parts]))


def without_last(events: Events, length: int) -> list[np.ndarray]:
    """Splits each user's items but the last one into pieces of at most ``length + 1`` items.

    Pieces overlap by one item, so that each item but the first is predicted once. Pieces with fewer
    than two items are omitted.
    """
    pieces = []
    for begin, end in zip(events.start[:-1], events.start[1:] - 1, strict=True):
        items = events.items[events.by_user[begin:end]]
        pieces += [items[at : at + length + 1] for at in range(0, max(len(items) - 1, 0), length)]
    return pieces


def last_events(events: Events) -> np.ndarray:
    """Returns the last event of each user with at least three events."""
    ends, counts = events.by_user[events.start[1:] - 1], np.diff(events.start)
    return ends[counts >= 3]


class Sampler:
    """Samples items by their frequency so far, and returns their shares of all events.

    ``known`` has the items in order of their first appearance. An item's number is its index.
    """

    def __init__(self, seed: int) -> None:
        """
        Args:
            seed: seed of the samples.
        """
        self._generator = np.random.default_rng(seed)
        self._seen: list[np.ndarray] = []
        self.known = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.int64)
        self._order = np.empty(0, dtype=np.int64)  # numbers of known items, sorted by item

    def add(self, items: np.ndarray) -> None:
        """Counts items; new items become known."""
        self._seen.append(items)
        fresh, first = np.unique(items, return_index=True)
        fresh = fresh[np.argsort(first)]
        fresh = fresh[~np.isin(fresh, self.known)]
        self.known = np.concatenate([self.known, fresh])
        self._counts = np.concatenate([self._counts, np.zeros(len(fresh), dtype=np.int64)])
        self._order = np.argsort(self.known)
        np.add.at(self._counts, self.number(items), 1)

    def number(self, items: np.ndarray) -> np.ndarray:
        """Returns the numbers of items; ``len(known)`` for unknown items."""
        at = np.searchsorted(self.known, items, sorter=self._order)
        found = self._order[np.minimum(at, len(self._order) - 1)]
        return np.where(self.known[found] == items, found, len(self.known))

    def sample(self, count: int) -> np.ndarray:
        """Samples items by their frequency."""
        if len(self._seen) > 1:
            self._seen = [np.concatenate(self._seen)]
        return self._generator.choice(self._seen[0], count)

    def log_share(self, items: np.ndarray) -> torch.Tensor:
        """Returns logarithms of the items' shares of all events, float32 ``[n]``."""
        counts = np.append(self._counts, 0)[self.number(items)]
        return torch.from_numpy(
            np.log((counts + 1) / (self._counts.sum() + len(self.known) + 1))
        ).float()


def batches(count: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Yields batches of the numbers below ``count`` in random order; omits a partial last batch."""
    order = np.random.default_rng(seed).permutation(count)
    for begin in range(0, count - size + 1, size):
        yield order[begin : begin + size]
