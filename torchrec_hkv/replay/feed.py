"""Parts of a log, as the steps of a table see them."""

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
        first: the number of the first step.
        ids: int64 ``[n]``, of all steps.
        groups: int64 ``[n]``, see :func:`groups_of`; None where all ids are replayed.
        ends: where the ids of each step end.
        whole: the same steps with all ids of the log; None where all are replayed, or not wanted.
    """

    first: int
    ids: Tensor
    groups: Tensor | None
    ends: list[int]
    whole: Steps | None = None


class Feed:
    """Makes steps of the parts of a log.

    Args:
        columns: that look the table up.
        sample: the ids to replay.
        batch_size: samples of a step.
        keeps_whole: whether steps of a sample have all ids, too.
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
        """The steps that end within a part, with what the part before left of the first.

        Args:
            part: the one after the last that was given.
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
        # Where the steps end, in samples of this part.
        bounds = (torch.arange(count) + first + 1) * self._batch_size
        bounds -= self._samples - part.num_samples
        steps = self._begun.cut(first, values, groups, _ends(samples, bounds))
        if self._whole is None:
            return steps
        whole = self._whole.cut(first, all_values, None, _ends(all_samples, bounds))
        return dataclasses.replace(steps, whole=whole)

    def last(self) -> Steps:
        """The step that the log ended in, if it did."""
        first = self._samples // self._batch_size
        steps = self._begun.last(first)
        if self._whole is None or not steps.ends:
            return steps
        return dataclasses.replace(steps, whole=self._whole.last(first, always=True))

    def _merged(self, columns: list[Ids]) -> Ids:
        """Ids of all columns by step, in a step column after column; each with its step's begin."""
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
    """Where steps end that end before these samples."""
    return bounds if samples is None else torch.searchsorted(samples, bounds)


class _Begun:
    """Cuts parts into steps, and keeps what has begun of the next one.

    Args:
        groups: int64 ``[0]``; None where ids have no groups.
    """

    def __init__(self, groups: Tensor | None) -> None:
        self._ids, self._groups = torch.empty(0, dtype=torch.int64), groups

    def cut(self, first: int, ids: Tensor, groups: Tensor | None, ends: Tensor) -> Steps:
        """Adds what was left, and leaves what is beyond the last step."""
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
        """What was left, as a step; without ids none, but for ``always``."""
        empty = torch.empty(0, dtype=torch.int64)
        ends = torch.zeros(1 if always or self._ids.numel() else 0, dtype=torch.int64)
        return self.cut(first, empty, None if self._groups is None else empty, ends)
