"""Tables on a CPU that replay the steps of a log."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table import AgedLFU, TableGroup
from torchrec_hkv.hash_table.eviction import FIRST_C
from torchrec_hkv.replay.aging import SampledAging
from torchrec_hkv.replay.counting import IdCounter, growing_table
from torchrec_hkv.replay.feed import Steps
from torchrec_hkv.replay.policy import EPOCHS, Policy
from torchrec_hkv.replay.sample import GROUPS, Sample


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of a replayed table.

    Attributes:
        policy: eviction, admission and expiry.
        rows: number of rows.
    """

    policy: Policy
    rows: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of a replayed table, for the ids in the sample.

    Attributes:
        counters: result of :meth:`TableGroup.counters`.
        misses_of_groups: int64 ``[GROUPS]``, misses by the id's group; empty if all ids are
            replayed.
        distinct_placed: number of distinct ids that have ever had a slot, or None if all have.
    """

    counters: dict[str, int]
    misses_of_groups: Tensor
    distinct_placed: int | None


class ReplayedTables:
    """Tables that replay the same ids with different settings.

    Args:
        name: name of the table.
        settings: settings of the tables.
        sample: the ids to replay.
        batch_size: samples of a step.
        share: share of half the host's memory, for recording which ids have had a slot.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[Setting],
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
            SampledAging(self._group, at, settings[at].policy.eviction, settings[at].rows)
            for at in aged
        ]
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

    def see(self, steps: Steps) -> None:
        """Runs the training lookups of steps, one call for each step."""
        tables, begin, all_before, all_after = len(self.settings), 0, [], []
        looks = not self._sample.is_all or bool(self._placed)
        whole = list(_split(steps.whole)) if self._aging and steps.whole is not None else []
        for number, end in enumerate(steps.ends, start=steps.first):
            if self._epoch_samples:
                self._group.set_epoch(number * self._batch_size // self._epoch_samples[0])
            ids = steps.ids[begin:end].repeat(tables)
            offsets = torch.arange(tables + 1) * (end - begin)
            begin = end
            if looks:
                all_before.append(self._group.find(ids, offsets, 1).view(tables, -1))
            for aging in self._aging:
                aging.begin_step()
            slots = self._group.find_or_insert(ids, offsets, 1)
            for aging in self._aging:
                aging.end_step(whole[number - steps.first])
            if self._placed:
                all_after.append(slots.view(tables, -1))
        if not all_before:
            return
        found = torch.cat(all_before, dim=1) >= 0
        if steps.groups is not None:
            for misses, hits in zip(self._misses, found, strict=True):
                misses += missed_of_groups(hits, steps.groups)
        for at, placed in self._placed.items():
            slots = torch.cat([part[at] for part in all_after])
            placed.find_or_insert_slots(steps.ids[(slots >= 0) & ~found[at]])

    def counts(self) -> list[Counts]:
        """Counts of each setting."""
        return [
            Counts(
                counters,
                misses,
                self._placed[at].size if at in self._placed else None,
            )
            for at, (counters, misses) in enumerate(
                zip(self._group.counters(), self._misses, strict=True)
            )
        ]


def _split(steps: Steps) -> Iterator[Tensor]:
    """The ids of each step."""
    begin = 0
    for end in steps.ends:
        yield steps.ids[begin:end]
        begin = end


def missed_of_groups(found: Tensor, groups: Tensor | None) -> Tensor:
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
        self.counter, self._sample = counter, sample
        self.misses = torch.zeros(1 if sample.is_all else GROUPS, dtype=torch.int64)

    def see(self, steps: Steps) -> None:
        """Counts the lookups of steps."""
        begin, found = 0, []
        for end in steps.ends:
            found.append(self.counter.count(steps.ids[begin:end]))
            begin = end
        if found:
            self.misses += missed_of_groups(torch.cat(found), steps.groups)
