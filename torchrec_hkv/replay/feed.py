"""Splits the parts of a log into steps of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.replay.counting import FrequentIds
from torchrec_hkv.replay.log import Ids, Part
from torchrec_hkv.replay.sample import Sample, groups_of, mixed
from torchrec_hkv.replay.windows import Windows


@dataclasses.dataclass(frozen=True)
class Steps:
    """Successive steps of a table.

    Attributes:
        first: number of the first step.
        ids: int64 ``[n]``, ids of all steps.
        groups: int64 ``[n]``, groups of the ids (:func:`groups_of`), or None if all ids are
            replayed.
        ends: end of each step in ``ids``.
        whole: the same steps with all ids of the log, or None if they are not kept.
    """

    first: int
    ids: Tensor
    groups: Tensor | None
    ends: list[int]
    whole: Steps | None = None


class Feed:
    """Splits the parts of a log into steps.

    Args:
        columns: columns whose ids the table looks up.
        sample: the ids to replay.
        batch_size: samples of a step.
        keeps_whole: whether to keep the steps with all ids, too.
    """

    def __init__(
        self,
        columns: Sequence[str],
        sample: Sample,
        batch_size: int,
        *,
        keeps_whole: bool = False,
    ) -> None:
        self._columns = tuple(columns)
        self._sample = sample
        self._batch_size = batch_size
        self._samples = 0
        self._begun = _Begun(None if sample.is_all else torch.empty(0, dtype=torch.int64))
        self._whole = _Begun(None) if keeps_whole and not sample.is_all else None
        self.frequent = None if sample.is_all else FrequentIds()
        self.windows = None if sample.is_all else Windows(sample)
        self.lookups = 0
        self.bounds: tuple[int, int] | None = None

    def steps(self, part: Part) -> Steps:
        """Returns the steps that end within a part. The first may begin in an earlier part.

        Args:
            part: the next part of the log.
        """
        ids = self._merged([part.columns[name] for name in self._columns])
        self._see(ids.values)
        all_values = values = ids.values
        all_samples = samples = ids.samples
        groups = None
        if self.windows is not None:
            bits = mixed(values)
            counted = self.windows.counted.taken(bits)
            bits = bits[counted]
            ours = self._sample.taken(bits)
            self.windows.see(bits, counted, ours, values.numel())
            at, groups = counted[ours], groups_of(bits[ours])
            values = values[at]
            samples = at if samples is None else samples[at]
        first = self._samples // self._batch_size
        self._samples += part.num_samples
        count = self._samples // self._batch_size - first
        # Ends of the steps, in samples of this part.
        bounds = (torch.arange(count) + first + 1) * self._batch_size
        bounds -= self._samples - part.num_samples
        steps = self._begun.cut(first, values, groups, _ends(samples, bounds))
        if self._whole is None:
            return steps
        whole = self._whole.cut(first, all_values, None, _ends(all_samples, bounds))
        return dataclasses.replace(steps, whole=whole)

    def last(self) -> Steps:
        """The last step, if the log ended within one."""
        first = self._samples // self._batch_size
        steps = self._begun.last(first)
        if self._whole is None or not steps.ends:
            return steps
        return dataclasses.replace(steps, whole=self._whole.last(first, always=True))

    def _merged(self, columns: list[Ids]) -> Ids:
        """Ids of all columns, ordered by step, then by column, with the begin of each step."""
        if len(columns) == 1:
            return columns[0]
        samples = torch.cat(
            [
                torch.arange(ids.values.numel()) if ids.samples is None else ids.samples
                for ids in columns
            ]
        )
        steps, order = ((samples + self._samples) // self._batch_size).sort(stable=True)
        values = torch.cat([ids.values for ids in columns])[order]
        return Ids(values, steps * self._batch_size - self._samples)

    def _see(self, ids: Tensor) -> None:
        if ids.numel() == 0:
            return
        self.lookups += ids.numel()
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if self.bounds is not None:
            low, high = min(low, self.bounds[0]), max(high, self.bounds[1])
        self.bounds = low, high
        if self.frequent is not None:
            self.frequent.see(ids)


def _ends(samples: Tensor | None, bounds: Tensor) -> Tensor:
    """Ends of steps among ids, from the ends in samples."""
    return bounds if samples is None else torch.searchsorted(samples, bounds)


class _Begun:
    """Cuts parts into steps, and keeps the beginning of the next step.

    Args:
        groups: int64 ``[0]``, or None if ids have no groups.
    """

    def __init__(self, groups: Tensor | None) -> None:
        self._ids, self._groups = torch.empty(0, dtype=torch.int64), groups

    def cut(self, first: int, ids: Tensor, groups: Tensor | None, ends: Tensor) -> Steps:
        """Prepends the remainder of the last part, and keeps the remainder of this part."""
        before = self._ids.numel()
        if before:
            ids = torch.cat([self._ids, ids])
            groups = None if groups is None else torch.cat([self._groups, groups])
        stops = (ends + before).tolist()
        used = stops[-1] if stops else 0
        self._ids = ids[used:].clone()
        self._groups = None if groups is None else groups[used:].clone()
        return Steps(first, ids[:used], None if groups is None else groups[:used], stops)

    def last(self, first: int, *, always: bool = False) -> Steps:
        """The remainder as a step; none if it has no ids, except with ``always``."""
        empty = torch.empty(0, dtype=torch.int64)
        ends = torch.zeros(1 if always or self._ids.numel() else 0, dtype=torch.int64)
        return self.cut(first, empty, None if self._groups is None else empty, ends)
