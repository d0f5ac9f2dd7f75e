"""Splits the parts of a log into steps of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.replay.log import Ids, Part
from torchrec_hkv.replay.sample import Sample, groups_of, sample_ids
from torchrec_hkv.replay.steps import Steps
from torchrec_hkv.replay.windows import Windows


class StepSplitter:
    """Splits the parts of a log into steps.

    Args:
        columns: columns whose ids the table looks up.
        sample: the ids to replay.
        batch_size: samples of a step.
        keeps_all_ids: whether to keep the steps with all ids, too.
    """

    def __init__(
        self,
        columns: Sequence[str],
        sample: Sample,
        batch_size: int,
        *,
        keeps_all_ids: bool = False,
    ) -> None:
        self._columns = tuple(columns)
        self._sample = sample
        self._batch_size = batch_size
        self._samples = 0
        self._sampled_cutter = _StepCutter(
            None if sample.is_all else torch.empty(0, dtype=torch.int64)
        )
        self._full_cutter = _StepCutter(None) if keeps_all_ids and not sample.is_all else None
        self.windows = None if sample.is_all else Windows(sample)
        #: As :func:`torchrec_hkv.replay.tables.work_of`.
        self.work = 5.0 if self.windows is None else 8 + 35 * self.windows.counted.rate
        self.lookups = 0
        self.bounds: tuple[int, int] | None = None

    def steps(self, part: Part) -> Steps:
        """Returns the steps that end within a part. The first may begin in an earlier part.

        Args:
            part: the next part of the log.
        """
        ids = self._merged([part.columns[name] for name in self._columns], part.num_samples)
        values, samples, groups = ids.values, ids.samples, None
        if self.windows is None:
            self._update_bounds(
                values.numel(), torch.stack(torch.aminmax(values)) if len(values) else values
            )
        else:
            sampled = sample_ids(values, self.windows.counted, self._sample)
            self._update_bounds(values.numel(), sampled.bounds)
            self.windows.update(sampled, values.numel())
            at, groups = (
                sampled.positions[sampled.smaller],
                groups_of(sampled.hashes[sampled.smaller]),
            )
            values = values[at]
            samples = at if samples is None else samples[at]
        first = self._samples // self._batch_size
        self._samples += part.num_samples
        count = self._samples // self._batch_size - first
        # Ends of the steps, in samples of this part.
        bounds = (torch.arange(count) + first + 1) * self._batch_size
        bounds -= self._samples - part.num_samples
        steps = self._sampled_cutter.cut(first, values, groups, _ends(samples, bounds), ids.values)
        if self._full_cutter is None:
            return steps
        unsampled = self._full_cutter.cut(
            first, ids.values, None, _ends(ids.samples, bounds), ids.values
        )
        return dataclasses.replace(steps, unsampled=unsampled)

    def last(self) -> Steps:
        """The last step, if the log ended within one."""
        first = self._samples // self._batch_size
        steps = self._sampled_cutter.last(first)
        if self._full_cutter is None or steps.ends.numel() == 0:
            return steps
        return dataclasses.replace(steps, unsampled=self._full_cutter.last(first, always=True))

    def _merged(self, columns: list[Ids], num_samples: int) -> Ids:
        """Ids of all columns, ordered by step, then by column, with the begin of each step."""
        if len(columns) == 1:
            return columns[0]
        first = self._samples // self._batch_size
        last = -(-(self._samples + num_samples) // self._batch_size)
        bounds = torch.arange(first, last + 1) * self._batch_size - self._samples
        # [columns, steps + 1], [columns, steps]: begin and number of a step's ids in each column.
        begins = torch.stack([_ends(ids.samples, bounds.clamp(0, num_samples)) for ids in columns])
        counts = begins.diff()
        # Begin of each step and column among all ids.
        places = counts.T.flatten().cumsum(0).view(-1, len(columns)).T - counts
        values = torch.empty(int(counts.sum()), dtype=torch.int64)
        for ids, number, place, begin in zip(columns, counts, places, begins, strict=True):
            moved = torch.repeat_interleave(place - begin[:-1], number)
            values[moved + torch.arange(moved.numel())] = ids.values
        return Ids(values, torch.repeat_interleave(bounds[:-1], counts.sum(0)))

    def _update_bounds(self, lookups: int, bounds: Tensor) -> None:
        if lookups == 0:
            return
        self.lookups += lookups
        low, high = bounds.tolist()
        if self.bounds is not None:
            low, high = min(low, self.bounds[0]), max(high, self.bounds[1])
        self.bounds = low, high


def _ends(samples: Tensor | None, bounds: Tensor) -> Tensor:
    """Ends of steps among ids, from the ends in samples."""
    return bounds if samples is None else torch.searchsorted(samples, bounds)


class _StepCutter:
    """Cuts parts into steps, and keeps the beginning of the next step.

    Args:
        groups: int64 ``[0]``, or None if ids have no groups.
    """

    def __init__(self, groups: Tensor | None) -> None:
        self._ids, self._groups = torch.empty(0, dtype=torch.int64), groups

    def cut(
        self, first: int, ids: Tensor, groups: Tensor | None, ends: Tensor, part: Tensor
    ) -> Steps:
        """Prepends the remainder of the last part, and keeps the remainder of this part."""
        before = self._ids.numel()
        if before:
            ids = torch.cat([self._ids, ids])
            groups = None if groups is None else torch.cat([self._groups, groups])
        stops = ends + before
        used = int(stops[-1]) if stops.numel() else 0
        self._ids = ids[used:].clone()
        self._groups = None if groups is None else groups[used:].clone()
        return Steps(first, ids[:used], None if groups is None else groups[:used], stops, part)

    def last(self, first: int, *, always: bool = False) -> Steps:
        """The remainder as a step; none if it has no ids, except with ``always``."""
        empty = torch.empty(0, dtype=torch.int64)
        ends = torch.zeros(1 if always or self._ids.numel() else 0, dtype=torch.int64)
        return self.cut(first, empty, None if self._groups is None else empty, ends, empty)
