"""Measured constants: how long a unit of each kind of work takes, fitted to timed steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrec_hkv.backends.workload import NO_TIME, StepTime, Work
from torchrec_hkv.json_schema import Fields, Items, Map, Number, Place, Text

#: The constant of what a group takes whatever it looks up: launches, and the host's part on a CPU.
FIXED = "fixed"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A timed step.

    Attributes:
        work: what it did.
        time: what it took.
        table_bytes: of the table.
    """

    work: Work
    time: StepTime
    table_bytes: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """Constants of tables of one size, in milliseconds a unit of work.

    Attributes:
        table_bytes: of the tables that were timed.
        forward: by the names of :attr:`Work.forward`, and ``fixed``.
        backward: by the names of :attr:`Work.backward`, and ``fixed``.
    """

    table_bytes: float
    forward: dict[str, float]
    backward: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants of a kind of table, by the size of the table, smallest first.

    Rows of a small table are in a cache, those of a large one are not; what lies between is
    interpolated by the logarithm of the size.
    """

    fits: tuple[Fit, ...]

    def time(self, work: Work, table_bytes: float) -> StepTime:
        """What work takes on a table of so many bytes, without what its group takes."""
        low, high, weight = self._between(table_bytes)
        times = [
            StepTime(_dot(fit.forward, work.forward), _dot(fit.backward, work.backward))
            for fit in (low, high)
        ]
        return StepTime(
            (1 - weight) * times[0].forward + weight * times[1].forward,
            (1 - weight) * times[0].backward + weight * times[1].backward,
        )

    @property
    def group_time(self) -> StepTime:
        """What a group of tables takes whatever it looks up."""
        if not self.fits:
            return NO_TIME
        first = self.fits[0]
        return StepTime(first.forward.get(FIXED, 0.0), first.backward.get(FIXED, 0.0))

    def _between(self, table_bytes: float) -> tuple[Fit, Fit, float]:
        if table_bytes <= self.fits[0].table_bytes:
            return self.fits[0], self.fits[0], 0.0
        for low, high in itertools.pairwise(self.fits):
            if table_bytes <= high.table_bytes:
                way = math.log(table_bytes / low.table_bytes)
                return low, high, way / math.log(high.table_bytes / low.table_bytes)
        return self.fits[-1], self.fits[-1], 0.0

    def to_json(self) -> list[dict[str, Any]]:
        """As a calibration file has it."""
        return [dataclasses.asdict(fit) for fit in self.fits]

    @classmethod
    def from_json(cls, content: Any) -> Constants:
        """From a calibration file.

        Raises:
            ValueError: it is not what :meth:`to_json` gives.
        """
        return CONSTANTS.read(content, Place("The content"))

    @classmethod
    def _of(cls, fits: Sequence[Fit], place: Place) -> Constants:
        if not fits:
            raise place.refuse([], "a list of one fit at least")
        return cls(tuple(sorted(fits, key=lambda fit: fit.table_bytes)))


class _Constants(Items):
    """The constants of a calibration file."""

    def __init__(self) -> None:
        costs = Map(Text(), Number(0))
        super().__init__(
            Fields({"table_bytes": Number(1), "forward": costs, "backward": costs}, Fit)
        )

    def read(self, value: object, place: Place) -> Constants:
        return Constants._of(super().read(value, place), place)


#: What :meth:`Constants.to_json` gives.
CONSTANTS = _Constants()


def fit_constants(samples: Sequence[Sample]) -> Constants:
    """The constants that explain timed steps best, relative to what each took; none is negative.

    Args:
        samples: of tables of one or several sizes. Each size has constants of its own.
    """
    # What a group takes is the same for all sizes: it follows from the smallest tables.
    sizes = sorted({sample.table_bytes for sample in samples})
    fits: list[Fit] = []
    for size in sizes:
        own = [sample for sample in samples if sample.table_bytes == size]
        fixed = (fits[0].forward[FIXED], fits[0].backward[FIXED]) if fits else (None, None)
        fits.append(
            Fit(
                size,
                fitted([s.work.forward for s in own], [s.time.forward for s in own], fixed[0]),
                fitted([s.work.backward for s in own], [s.time.backward for s in own], fixed[1]),
            )
        )
    return Constants(tuple(fits))


def fitted(
    works: Sequence[Mapping[str, float]], times: Sequence[float], fixed: float | None = None
) -> dict[str, float]:
    """Least squares of relative errors under constants of at least 0.

    Args:
        works: counts by name.
        times: milliseconds that each took.
        fixed: what each took besides; None: it is fitted, too.

    Returns:
        Milliseconds of each name, and of ``fixed``.
    """
    names = list(dict.fromkeys(name for work in works for name in work))
    measured = torch.tensor(times, dtype=torch.float64)
    counts = torch.tensor(
        [[work.get(name, 0.0) for name in names] for work in works], dtype=torch.float64
    )
    target = measured - (fixed or 0.0)
    if fixed is None:
        names = [*names, FIXED]
        counts = torch.cat([counts, torch.ones(len(times), 1, dtype=torch.float64)], dim=1)
    scaled = counts / measured[:, None]
    norms = scaled.norm(dim=0).clamp_min(1e-300)
    scaled, wanted = scaled / norms, target / measured
    best = _nonnegative(scaled, wanted)
    constants = dict(zip(names, (best / norms).tolist(), strict=True))
    return constants if fixed is None else {**constants, FIXED: fixed}


def _nonnegative(columns: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The least squares solution among those without negative numbers: constants are let in one by
    one, the most useful first, and those that would fall below zero are put back."""
    count = columns.shape[1]
    solution = torch.zeros(count, dtype=columns.dtype)
    free = torch.zeros(count, dtype=torch.bool)
    for _ in range(3 * count):
        use = columns.T @ (wanted - columns @ solution)
        use[free] = -math.inf
        if float(use.max()) <= 1e-10:
            break
        free[int(use.argmax())] = True
        while free.any():
            found = torch.zeros_like(solution)
            of_free = torch.linalg.lstsq(columns[:, free], wanted[:, None], driver="gelsd")
            found[free] = of_free.solution[:, 0]
            below = free & (found <= 0)
            if not below.any():
                solution = found
                break
            # As far towards it as all of them allow.
            way = (solution[below] / (solution[below] - found[below])).min()
            solution = (solution + way * (found - solution)).clamp_min(0)
            free &= solution > 1e-14
            solution[~free] = 0
    return solution


def _dot(constants: Mapping[str, float], work: Mapping[str, float]) -> float:
    return sum(constants.get(name, 0.0) * count for name, count in work.items())
