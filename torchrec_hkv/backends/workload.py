"""The work of a training step on a table: its number of ids, of unique ids, and their skew."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import torch

#: Counts of a histogram that differ by less than this share are merged.
_RESOLUTION = 0.01


@dataclasses.dataclass(frozen=True, repr=False)
class IdFrequencies:
    """How often the ids of a table are looked up, as a histogram of a sample of training ids.

    Attributes:
        histogram: pairs (number of ids, lookups of each of them in the sample), most frequent ids
            first.
        lowest: the lowest id of the sample; None if only counts are known.
        highest: the highest id of the sample; None if only counts are known.
        shares: pairs (rows of a table, share of lookups that find their row in it), sorted by
            rows, as measured by a replay. A table with a row per id has the share 1. If
            empty, the most frequent ids are assumed to have the rows.

    Raises:
        ValueError: the histogram is empty, a number is not positive, ``shares`` does not increase,
            or ``lowest`` is above ``highest``.
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

    def __repr__(self) -> str:
        # TorchRec formats the constraints of all tables; histograms are long.
        return f"IdFrequencies({self.num_ids} ids, {self.lookups:g} lookups)"

    @classmethod
    def of_ids(cls, ids: torch.Tensor) -> IdFrequencies:
        """Makes a histogram from a sample of ids. Use a large sample: ids that are not in it are
        unknown to the planner.

        Args:
            ids: ids of batches, of any integer dtype and shape, with repetitions.

        Raises:
            ValueError: the sample is empty.
        """
        if ids.numel() == 0:
            raise ValueError("IdFrequencies: there are no ids, but at least one is needed.")
        distinct, counts = ids.flatten().unique(return_counts=True)
        return cls(_merged(counts), int(distinct[0]), int(distinct[-1]))

    @classmethod
    def of_counts(cls, counts: Sequence[int] | torch.Tensor) -> IdFrequencies:
        """Makes a histogram from the number of lookups of each id. Zeros are skipped.

        Raises:
            ValueError: all counts are zero.
        """
        counts = torch.as_tensor(counts, dtype=torch.float64).flatten()
        return cls(_merged(counts[counts > 0]))

    @functools.cached_property
    def num_ids(self) -> int:
        """Number of unique ids."""
        return sum(count for count, _ in self.histogram)

    @functools.cached_property
    def lookups(self) -> float:
        """Number of lookups in the sample."""
        return sum(count * each for count, each in self.histogram)

    def distinct(self, lookups: float, beyond: float = 0) -> float:
        """Expected number of unique ids among ``lookups`` lookups.

        Args:
            lookups: number of independent draws from these frequencies.
            beyond: number of most frequent ids that are not counted.
        """
        key = (lookups, beyond)
        if key not in self._expected:
            self._expected[key] = self._distinct(lookups, beyond)
        return self._expected[key]

    @functools.cached_property
    def _expected(self) -> dict[tuple[float, float], float]:
        """A cache for :meth:`distinct`, because the options of a table ask for the same results."""
        return {}

    def _distinct(self, lookups: float, beyond: float) -> float:
        total, expected, skipped = self.lookups, 0.0, float(beyond)
        for count, each in self.histogram:
            remaining = max(count - skipped, 0.0)
            skipped = max(skipped - count, 0.0)
            if remaining:
                expected += remaining * _chance(lookups, each / total)
        return expected

    def share_of(self, rows: float) -> float:
        """Share of lookups that find a row in a table of ``rows`` rows: as measured, or that of
        the ``rows`` most frequent ids."""
        if self.shares:
            return self._measured_share(rows)
        ids, lookups = self._sums
        at = bisect.bisect_right(ids, rows)
        if at == len(ids):
            return 1.0
        covered = (lookups[at - 1] if at else 0.0) + (rows - (ids[at - 1] if at else 0)) * (
            self.histogram[at][1]
        )
        return covered / self.lookups

    @functools.cached_property
    def _sums(self) -> tuple[list[int], list[float]]:
        """Numbers of ids and of lookups, summed from the first pair of the histogram to each."""
        ids = list(itertools.accumulate(count for count, _ in self.histogram))
        return ids, list(itertools.accumulate(count * each for count, each in self.histogram))

    def _measured_share(self, rows: float) -> float:
        """Interpolates linearly in the logarithm of rows, up to a row per id. Below the first
        measured point the share is proportional to rows."""
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
    """Probability that an id with this share of lookups is among ``draws`` lookups."""
    return 1.0 if share >= 1.0 else -math.expm1(draws * math.log1p(-share))


def _is_count_pair(pair: object) -> bool:
    """Whether ``pair`` is a positive whole number of ids and a positive number of lookups."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return False
    if any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in pair):
        return False
    ids, lookups = pair
    return 0 < ids < math.inf and ids == int(ids) and 0 < lookups < math.inf


def _merged(counts: torch.Tensor) -> tuple[tuple[int, float], ...]:
    """The histogram of counts. Nearly equal counts are merged into their mean."""
    values, ids = counts.double().unique(return_counts=True)
    groups: dict[int, list[float]] = {}
    for value, number in zip(values.tolist(), ids.tolist(), strict=True):
        group = groups.setdefault(int(math.log(value) / math.log1p(_RESOLUTION)), [0, 0.0])
        group[0] += number
        group[1] += number * value
    return tuple((int(number), total / number) for number, total in groups.values())


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one step on one shard of a table.

    Attributes:
        ids: number of ids looked up in the shard.
        distinct: number of unique ids among them.
        bags: number of bags of all features; for sequences, number of ids.
        frequencies: frequencies of all ids of the table; None if all ids are equally frequent.
        share: share of the table's ids that this shard holds: 1, or 1 / ranks if rows are sharded.
    """

    ids: float
    distinct: float
    bags: float
    frequencies: IdFrequencies | None = None
    share: float = 1.0

    def distinct_beyond(self, rows: float, of: float) -> float:
        """Number of unique ids of a step that are not among the shard's most frequent ids.

        Args:
            rows: number of most frequent ids to leave out.
            of: rows of the shard. Ids are spread evenly over them if no frequencies are known.
        """
        if self.frequencies is None:
            return self.distinct * max(0.0, 1.0 - rows / of)
        ids = self.ids / self.share
        return self.share * self.frequencies.distinct(ids, rows / self.share)


@dataclasses.dataclass(frozen=True)
class Work:
    """Amounts of work in a step. A measured constant gives the time of each unit.

    Attributes:
        forward: amounts by name, such as ``ids`` or ``flop``.
        backward: the same for the backward and the optimizer.
    """

    forward: dict[str, float]
    backward: dict[str, float]

    def times(self, count: int) -> Work:
        """The work of ``count`` such tables."""
        return Work(
            {name: count * amount for name, amount in self.forward.items()},
            {name: count * amount for name, amount in self.backward.items()},
        )


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step's lookup, and of its backward including the optimizer."""

    forward: float
    backward: float

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(self.forward + other.forward, self.backward + other.backward)


NO_TIME = StepTime(0.0, 0.0)


def row_work(load: Workload, dim: int, row_bytes: float) -> Work:
    """The work of a table that reads and writes whole rows.

    Args:
        load: the step's ids in the shard.
        dim: number of columns of the shard.
        row_bytes: bytes of a row with its optimizer state.
    """
    read = 4.0 * dim
    common = {"ids": load.ids, "id_bytes": load.ids * read, "bag_bytes": load.bags * read}
    common["distinct"] = load.distinct
    return Work(
        forward={**common, "row_bytes": load.distinct * read},
        backward={**common, "row_bytes": load.distinct * row_bytes},
    )
