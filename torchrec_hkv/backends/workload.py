"""What a training step asks of a table: how many ids, how many different ones, how they repeat."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

#: Counts of a histogram that differ by less than this share are taken for one.
_RESOLUTION = 0.01


@dataclasses.dataclass(frozen=True)
class IdFrequencies:
    """How often the ids of a table are looked up: a histogram, from a sample of a training's ids.

    Attributes:
        histogram: pairs (number of ids, lookups of each of them in the sample), most frequent ids
            first.
        lowest: the lowest id that was seen; None where only counts are known.
        highest: the highest.
        shares: pairs (rows of a table, share of lookups that then find their id's row), by rows,
            where a replay has measured them; a row for each id stands for 1. Without them the most
            frequent ids are taken to have the rows.

    Raises:
        ValueError: there is no id, a number is not positive, shares don't rise, or ``lowest`` is
            above ``highest``.
    """

    histogram: tuple[tuple[int, float], ...]
    lowest: int | None = None
    highest: int | None = None
    shares: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.histogram, Sequence) or isinstance(self.histogram, (str, bytes)):
            raise ValueError(
                f"IdFrequencies: the histogram is {self.histogram!r}, but must be a sequence of "
                "pairs."
            )
        if not self.histogram:
            raise ValueError("IdFrequencies: the histogram is empty, but must have an id.")
        for name in ("lowest", "highest"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(
                    f"IdFrequencies: {name} is {value!r}, but must be an integer or None."
                )
        if self.lowest is not None and self.highest is not None and self.lowest > self.highest:
            raise ValueError(
                f"IdFrequencies: lowest is {self.lowest} and highest is {self.highest}, but the "
                "lowest id must not be larger."
            )
        for pair in self.histogram:
            if not _is_count_pair(pair):
                raise ValueError(
                    f"IdFrequencies: the histogram has {pair!r}, but must have pairs of a positive "
                    "number of ids and a positive number of lookups of each."
                )
        before = (0, 0.0)
        for pair in self.shares:
            if not _is_count_pair(pair) or pair[0] <= before[0] or not before[1] <= pair[1] <= 1:
                raise ValueError(
                    f"IdFrequencies: shares has {pair!r} behind {before!r}, but must have pairs of "
                    "a number of rows and a share of lookups up to 1, both rising."
                )
            before = pair
        object.__setattr__(self, "shares", tuple((int(n), float(s)) for n, s in self.shares))
        ordered = sorted(self.histogram, key=lambda pair: -pair[1])
        object.__setattr__(self, "histogram", tuple((int(n), float(c)) for n, c in ordered))

    @classmethod
    def of_ids(cls, ids: torch.Tensor) -> IdFrequencies:
        """From a sample of ids, as many as possible: ids that it lacks are not known of.

        Args:
            ids: of any integer dtype and shape, as batches have them.

        Raises:
            ValueError: there is none.
        """
        if ids.numel() == 0:
            raise ValueError("IdFrequencies: there are no ids, but at least one is needed.")
        distinct, counts = ids.flatten().unique(return_counts=True)
        return cls(_merged(counts), int(distinct[0]), int(distinct[-1]))

    @classmethod
    def of_counts(cls, counts: Sequence[int] | torch.Tensor) -> IdFrequencies:
        """From the number of lookups of each id; zeros are left out.

        Raises:
            ValueError: no id was looked up.
        """
        counts = torch.as_tensor(counts, dtype=torch.float64).flatten()
        return cls(_merged(counts[counts > 0]))

    @property
    def num_ids(self) -> int:
        """Different ids."""
        return sum(count for count, _ in self.histogram)

    @property
    def lookups(self) -> float:
        """Lookups of the sample."""
        return sum(count * each for count, each in self.histogram)

    def distinct(self, lookups: float, beyond: float = 0) -> float:
        """Different ids that are to be expected among so many lookups.

        Args:
            lookups: independent draws by these frequencies.
            beyond: leaves out so many of the most frequent ids.
        """
        total, expected, skipped = self.lookups, 0.0, float(beyond)
        for count, each in self.histogram:
            left = max(count - skipped, 0.0)
            skipped = max(skipped - count, 0.0)
            if left:
                expected += left * _chance(lookups, each / total)
        return expected

    def share_of(self, rows: float) -> float:
        """The share of lookups that find a row where there are so many: as it was measured, or that
        of the ``rows`` most frequent ids."""
        if self.shares:
            return self._measured_share(rows)
        held, left = 0.0, float(rows)
        for count, each in self.histogram:
            held += min(count, left) * each
            left = max(left - count, 0.0)
        return held / self.lookups

    def _measured_share(self, rows: float) -> float:
        """Linear in the logarithm of rows between measured points and a row for each id; below the
        first point in proportion to rows."""
        points = [*self.shares, (max(self.num_ids, self.shares[-1][0] + 1), 1.0)]
        first, share = points[0]
        if rows <= first:
            return share * rows / first
        for (low, low_share), (high, high_share) in itertools.pairwise(points):
            if rows < high:
                part = math.log(rows / low) / math.log(high / low)
                return low_share + part * (high_share - low_share)
        return 1.0


def _chance(draws: float, share: float) -> float:
    """That an id of this share of lookups is among so many draws."""
    return 1.0 if share >= 1.0 else -math.expm1(draws * math.log1p(-share))


def _is_count_pair(pair: object) -> bool:
    """Whether it is a whole number of ids and a number of lookups, both positive."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return False
    if any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in pair):
        return False
    ids, lookups = pair
    return 0 < ids < math.inf and ids == int(ids) and 0 < lookups < math.inf


def _merged(counts: torch.Tensor) -> tuple[tuple[int, float], ...]:
    """Equal counts as one pair, and large ones that are nearly equal by their mean."""
    values, ids = counts.double().unique(return_counts=True)
    groups: dict[int, list[float]] = {}
    for value, number in zip(values.tolist(), ids.tolist(), strict=True):
        group = groups.setdefault(int(math.log(value) / math.log1p(_RESOLUTION)), [0, 0.0])
        group[0] += number
        group[1] += number * value
    return tuple((int(number), total / number) for number, total in groups.values())


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one step asks of one shard of a table.

    Attributes:
        ids: lookups that reach the shard.
        distinct: different ids among them.
        bags: bags of all features; for sequences, ids.
        frequencies: of all ids of the table; None where ids come alike.
        share: of the table's ids that come to the shard: 1, or 1 / ranks where rows are spread.
    """

    ids: float
    distinct: float
    bags: float
    frequencies: IdFrequencies | None = None
    share: float = 1.0

    def distinct_beyond(self, rows: float, of: float) -> float:
        """Different ids of a step that are not among the ``rows`` most frequent ones of the shard.

        Args:
            rows: that are kept near.
            of: rows of the shard, which ids are spread over where no frequencies are known.
        """
        if self.frequencies is None:
            return self.distinct * max(0.0, 1.0 - rows / of)
        ids = self.ids / self.share
        return self.share * self.frequencies.distinct(ids, rows / self.share)


@dataclasses.dataclass(frozen=True)
class Work:
    """Counts of what a step does, of which measured constants say how long each takes.

    Attributes:
        forward: by name, such as ``ids`` or ``flop``.
        backward: likewise; with the optimizer.
    """

    forward: dict[str, float]
    backward: dict[str, float]

    def times(self, count: int) -> Work:
        """That of so many tables."""
        return Work(
            {name: count * own for name, own in self.forward.items()},
            {name: count * own for name, own in self.backward.items()},
        )


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step's lookup, and of its backward with the optimizer."""

    forward: float
    backward: float

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(self.forward + other.forward, self.backward + other.backward)


NO_TIME = StepTime(0.0, 0.0)


def row_work(load: Workload, dim: int, row_bytes: float) -> Work:
    """Work of tables that read and write whole rows.

    Args:
        load: of the shard.
        dim: its columns.
        row_bytes: of a row with its optimizer state.
    """
    read = 4.0 * dim
    common = {"ids": load.ids, "id_bytes": load.ids * read, "bag_bytes": load.bags * read}
    common["distinct"] = load.distinct
    return Work(
        forward={**common, "row_bytes": load.distinct * read},
        backward={**common, "row_bytes": load.distinct * row_bytes},
    )
