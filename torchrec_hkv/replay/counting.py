"""Counts the lookups of ids: of all ids, or of a sample and the most frequent ids."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.hash_table import HashTable, table_memory
from torchrec_hkv.hash_table.available_memory import host_memory
from torchrec_hkv.replay.sample import Sample
from torchrec_hkv.replay.steps import Steps

#: Number of candidates for the most frequent ids; the stride of the counted lookups (a prime,
#: because logs repeat with the number of lookups of a request); and the least number of counted
#: lookups of a frequent id.
_HOT_ROWS, _HOT_STRIDE, _HOT_COUNT = 1 << 16, 17, 64
_HOT_CALL = 1 << 12
_FIRST_ROWS = 1 << 16


def growing_table(name: str, share: float = 1.0) -> HashTable:
    """Creates a table that counts ids. It grows within its share of the memory.

    Args:
        name: name of the table.
        share: share of half the host's available memory that the table may take.
    """
    slot = table_memory(_FIRST_ROWS, 1, 0, "lfu").bytes // _FIRST_ROWS + 1
    capacity = max(int(host_memory()[0] / 2 * share) // slot, _FIRST_ROWS)
    return HashTable(1, capacity, eviction="lfu", initial_capacity=_FIRST_ROWS, name=name)


class IdCounter:
    """Counts the lookups of each id in the sample, and the hits of a table that never evicts.

    Args:
        table: name of the replayed table.
        share: share of half the host's available memory.
    """

    def __init__(self, table: str, share: float = 1.0) -> None:
        self.table = table
        self._counts = _C.IdCounts(int(host_memory()[0] / 2 * share))

    def count(self, ids: Tensor, ends: Tensor) -> Tensor:
        """Counts the ids of steps. Returns which ids were seen in an earlier step, bool ``[n]``.

        Args:
            ids: int64 ``[n]``.
            ends: int64, end of each step in ``ids``.
        """
        return self._counts.count(ids, ends)

    def check(self) -> None:
        """Checks that all ids were counted.

        Raises:
            ValueError: the memory is too small for the ids.
        """
        if self._counts.overflowed:
            raise ValueError(
                f"Table {self.table!r} has more than {self.distinct:,} different ids, more "
                "than fit into memory: replay a sample of them."
            )

    @property
    def distinct(self) -> int:
        """Number of distinct ids so far."""
        return self._counts.size

    def entries(self) -> tuple[Tensor, Tensor]:
        """The ids and the number of lookups of each, int64 ``[n]`` both."""
        return self._counts.entries()


class FrequentIds:
    """Counts the most frequent ids of a log, in a share of its lookups, because a sample of ids may
    lack them."""

    #: As :func:`torchrec_hkv.replay.tables.work_of`.
    work = 12.0

    def __init__(self) -> None:
        self._counts = HashTable(1, _HOT_ROWS, eviction="lfu", name="frequent")
        self._counted_lookups = 0
        self._generator = torch.Generator().manual_seed(0)

    def update(self, steps: Steps) -> None:
        """Counts a share of the lookups in the part of the log in which the steps end."""
        ids = steps.part
        begin = int(torch.randint(_HOT_STRIDE, (1,), generator=self._generator))
        looked_at = ids[begin::_HOT_STRIDE].contiguous()
        for call in looked_at.split(_HOT_CALL):
            if call.numel() == 0:
                continue
            # A training lookup always inserts a new id.
            self._counts.group.find_or_insert(call, torch.tensor([0, call.numel()]), 1)
        self._counted_lookups += looked_at.numel()

    def entries(self, lookups: int) -> tuple[Tensor, Tensor]:
        """Ids that are certainly frequent, and the expected number of lookups of each, float64.

        Args:
            lookups: number of lookups in the whole log.
        """
        parts = [
            (part.ids, part.scores) for part in self._counts.export_if(score_at_least=_HOT_COUNT)
        ]
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(ids for ids, _ in parts)])
        counts = torch.cat([torch.empty(0, dtype=torch.int64), *(counts for _, counts in parts)])
        return ids, counts.double() * (lookups / max(self._counted_lookups, 1))


def frequencies(
    counter: IdCounter,
    sample: Sample,
    frequent: FrequentIds | None,
    lookups: int,
    bounds: tuple[int, int],
) -> IdFrequencies:
    """Builds the histogram of a log's ids.

    Args:
        counter: counter of the ids in the sample.
        sample: the ids that were counted.
        frequent: counter of the most frequent ids, or None if all ids were counted.
        lookups: number of lookups in the whole log.
        bounds: lowest and highest id.
    """
    ids, counts = counter.entries()
    if frequent is None:
        of_all = IdFrequencies.of_counts(counts)
        return IdFrequencies(of_all.histogram, *bounds)
    hot, hot_counts = frequent.entries(lookups)
    others = counts[~torch.isin(ids, hot)]
    histogram: list[tuple[int, float]] = []
    if others.numel():
        # The total number of lookups is known, so the other ids have the remaining lookups.
        remaining = lookups - float(hot_counts.sum())
        scale = max(remaining * sample.rate / float(others.sum()), 0.5)
        for number, each in IdFrequencies.of_counts(others).histogram:
            histogram.append((max(1, round(number / sample.rate)), scale * each))
    if hot.numel():
        histogram += IdFrequencies.of_counts(hot_counts).histogram
    return IdFrequencies(tuple(histogram), *bounds)
