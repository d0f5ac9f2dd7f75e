"""Tables on a CPU that replay the steps of a log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table import AgedLFU, TableGroup, table_memory
from torchrec_hkv.hash_table.eviction import FIRST_C
from torchrec_hkv.replay.aging import full_table_aging
from torchrec_hkv.replay.counting import IdCounter, growing_table
from torchrec_hkv.replay.policy import EPOCHS, Policy
from torchrec_hkv.replay.sample import GROUPS, Sample
from torchrec_hkv.replay.steps import Steps

#: Rows from which on the miniatures of an adaptive table have less than a 32nd of its rows.
_MIN_SHARED_ROWS = 1 << 17


@dataclasses.dataclass(frozen=True)
class ReplaySetting:
    """Settings of a replayed table.

    Attributes:
        policy: eviction, admission and expiry.
        rows: number of rows.
    """

    policy: Policy
    rows: int


@dataclasses.dataclass(frozen=True)
class ReplayCounts:
    """Counts of a replayed table, for the ids in the sample.

    Attributes:
        counters: result of :meth:`TableGroup.counters`.
        misses_by_group: int64 ``[GROUPS]``, misses by the id's group; empty if all ids are
            replayed.
        distinct_placed: number of distinct ids that have ever had a slot, or None if all have.
    """

    counters: dict[str, int]
    misses_by_group: Tensor
    distinct_placed: int | None


def work_of(setting: ReplaySetting, sample: Sample) -> float:
    """Time of replaying a table, in about ns for each lookup of the log."""
    work = 300 * sample.rate
    if not sample.is_all and setting.policy.eviction == "adaptive":
        work += 3 + 30 * min(1.0, _MIN_SHARED_ROWS / setting.rows)  # its miniatures
    return work


def slots_share(setting: ReplaySetting, sample: Sample) -> float:
    """The slots of a sampled table, divided by the sampled share of the whole table's slots.

    It is not exactly 1, because rows are rounded up to whole buckets.
    """
    spec = setting.policy.spec(setting.rows, sample.rate)
    sampled, full = (
        table_memory(rows, 1, 0, spec.eviction).num_slots for rows in (spec.capacity, setting.rows)
    )
    return sampled / (sample.rate * full)


class ReplayedTables:
    """Tables that replay the same ids with different settings.

    Args:
        name: name of the table.
        settings: settings of the tables.
        sample: the ids to replay.
        batch_size: samples of a step.
        share: share of half the host's memory that the record of placed ids may take.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[ReplaySetting],
        sample: Sample,
        batch_size: int,
        share: float = 1.0,
    ) -> None:
        self.settings = tuple(settings)
        self._sample, self._batch_size = sample, batch_size
        specs = [
            dataclasses.replace(
                setting.policy.spec(setting.rows, sample.rate),
                name=f"{name}: {setting.policy}, {setting.rows:,} rows",
            )
            for setting in settings
        ]
        aged = [] if sample.is_all else [at for at, it in enumerate(settings) if it.policy.ages]
        for at in aged:
            if specs[at].eviction == "adaptive":
                specs[at] = dataclasses.replace(specs[at], eviction=AgedLFU(FIRST_C))
        self._group = TableGroup(specs, list(range(len(specs))), None, device="cpu", state_dim=0)
        self._aging = [
            (at, full_table_aging(settings[at].policy.eviction, settings[at].rows)) for at in aged
        ]
        self.work = sum(work_of(setting, sample) for setting in settings)
        self._epoch_samples = [
            setting.policy.epoch_samples
            for setting in settings
            if setting.policy.eviction in EPOCHS and setting.policy.epoch_samples
        ]
        count = 0 if sample.is_all else GROUPS
        self._misses = torch.zeros(len(specs), count, dtype=torch.int64)
        # Without admission every id gets a slot at its first lookup.
        self._placed = {
            at: growing_table(f"{name}: placed", share / len(specs))
            for at, spec in enumerate(specs)
            if spec.admission is not None
        }

    def update(self, steps: Steps) -> None:
        """Runs the training lookups of steps, one call per step."""
        if steps.ends.numel() == 0:
            return
        epochs, unsampled = None, steps.unsampled
        if self._epoch_samples:
            numbers = torch.arange(steps.first, steps.first + steps.ends.numel())
            epochs = numbers * self._batch_size // self._epoch_samples[0]
        slots, found = _C.replay_steps(
            self._group.handle,
            steps.ids,
            steps.ends,
            epochs,
            self._aging,
            None if unsampled is None else unsampled.ids,
            None if unsampled is None else unsampled.ends,
        )
        if steps.groups is not None:
            for misses, hits in zip(self._misses, found, strict=True):
                misses += misses_by_group(hits, steps.groups)
        for at, placed in self._placed.items():
            placed.find_or_insert_slots(steps.ids[(slots[at] >= 0) & ~found[at]])

    def counts(self) -> list[ReplayCounts]:
        """Counts of each setting."""
        return [
            ReplayCounts(
                counters,
                misses,
                self._placed[at].size if at in self._placed else None,
            )
            for at, (counters, misses) in enumerate(
                zip(self._group.counters(), self._misses, strict=True)
            )
        ]


def misses_by_group(found: Tensor, groups: Tensor | None) -> Tensor:
    """Misses of each group, int64 ``[GROUPS]``, or ``[1]`` without groups.

    Args:
        found: bool ``[n]``, whether each id was in the table.
        groups: int64 ``[n]``, groups of the ids.
    """
    if groups is None:
        return (~found).sum().unsqueeze(0)
    return torch.bincount(torch.where(found, GROUPS, groups), minlength=GROUPS + 1)[:GROUPS]


class CountedIds:
    """Counts ids, and hits of a table that never evicts.

    Args:
        counter: counter of the ids in the sample.
        sample: the ids to count.
    """

    def __init__(self, counter: IdCounter, sample: Sample) -> None:
        self.counter, self.work = counter, 70 * sample.rate
        self.misses = torch.zeros(1 if sample.is_all else GROUPS, dtype=torch.int64)

    def update(self, steps: Steps) -> None:
        """Counts the lookups of steps."""
        if steps.ends.numel():
            self.misses += misses_by_group(self.counter.count(steps.ids, steps.ends), steps.groups)
