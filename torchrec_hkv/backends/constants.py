"""Cost constants: the time of a unit of each kind of work, fitted to timed steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrec_hkv.backends.workload import NO_TIME, StepTime, Work
from torchrec_hkv.json_schema import Fields, Items, JsonPlace, Map, Number, Text

#: Name of the constant time of a group: kernel launches, and the host's work on a CPU.
FIXED = "fixed"


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A timed step.

    Attributes:
        work: amounts of work in the step.
        time: the measured time.
        table_bytes: bytes of the table.
    """

    work: Work
    time: StepTime
    table_bytes: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """Constants of tables of one size, in milliseconds per unit of work.

    Attributes:
        table_bytes: bytes of the timed tables.
        forward: constants by the names of :attr:`Work.forward`, and ``fixed``.
        backward: constants by the names of :attr:`Work.backward`, and ``fixed``.
    """

    table_bytes: float
    forward: dict[str, float]
    backward: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants of a kind of table for several table sizes, in increasing order.

    Small tables fit in a cache, large ones do not. Times between two sizes are interpolated
    linearly in the logarithm of the size.
    """

    fits: tuple[Fit, ...]

    def time(self, work: Work, table_bytes: float) -> StepTime:
        """Time of the work on a table of ``table_bytes``, without :attr:`group_time`."""
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
        """Constant time of a group of tables in each step."""
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
        """The content for a calibration file."""
        return [dataclasses.asdict(fit) for fit in self.fits]

    @classmethod
    def from_json(cls, content: Any) -> Constants:
        """Reads the content of a calibration file.

        Raises:
            ValueError: the content is not a result of :meth:`to_json`.
        """
        return CONSTANTS.read(content, JsonPlace("The content"))

    @classmethod
    def _of(cls, fits: Sequence[Fit], place: JsonPlace) -> Constants:
        if not fits:
            raise place.refuse([], "a list of one fit at least")
        return cls(tuple(sorted(fits, key=lambda fit: fit.table_bytes)))


class _Constants(Items):
    """JSON schema of the constants in a calibration file."""

    def __init__(self) -> None:
        costs = Map(Text(), Number(0))
        super().__init__(
            Fields({"table_bytes": Number(1), "forward": costs, "backward": costs}, Fit)
        )

    def read(self, value: object, place: JsonPlace) -> Constants:
        return Constants._of(super().read(value, place), place)


#: JSON schema of :meth:`Constants.to_json`.
CONSTANTS = _Constants()


def fit_constants(samples: Sequence[TimedStep]) -> Constants:
    """Fits non-negative constants by least squares of the relative errors.

    Args:
        samples: timed steps on tables of one or several sizes. Each size gets its own constants.
    """
    # The constant time of a group is fitted on the smallest tables and used for all sizes.
    sizes = sorted({sample.table_bytes for sample in samples})
    fits: list[Fit] = []
    for size in sizes:
        of_size = [sample for sample in samples if sample.table_bytes == size]
        fixed = (fits[0].forward[FIXED], fits[0].backward[FIXED]) if fits else (None, None)
        fits.append(
            Fit(
                size,
                fit_works(
                    [s.work.forward for s in of_size], [s.time.forward for s in of_size], fixed[0]
                ),
                fit_works(
                    [s.work.backward for s in of_size], [s.time.backward for s in of_size], fixed[1]
                ),
            )
        )
    return Constants(tuple(fits))


def fit_works(
    works: Sequence[Mapping[str, float]], times: Sequence[float], fixed: float | None = None
) -> dict[str, float]:
    """Least squares of the relative errors, with constants of at least 0.

    Args:
        works: amounts of work by name, one mapping a step.
        times: milliseconds of each step.
        fixed: known constant time of a step in milliseconds; None to fit it too.

    Returns:
        Milliseconds per unit for each name, and for ``fixed``.
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
    scaled, targets = scaled / norms, target / measured
    best = _nonnegative(scaled, targets)
    constants = dict(zip(names, (best / norms).tolist(), strict=True))
    return constants if fixed is None else {**constants, FIXED: fixed}


def _nonnegative(columns: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Least squares solution without negative values (active set method): constants enter one by
    one, the most useful first. Constants that would become negative leave again."""
    count = columns.shape[1]
    solution = torch.zeros(count, dtype=columns.dtype)
    free = torch.zeros(count, dtype=torch.bool)
    for _ in range(3 * count):
        use = columns.T @ (targets - columns @ solution)
        use[free] = -math.inf
        if float(use.max()) <= 1e-10:
            break
        free[int(use.argmax())] = True
        while free.any():
            found = torch.zeros_like(solution)
            of_free = torch.linalg.lstsq(columns[:, free], targets[:, None], driver="gelsd")
            found[free] = of_free.solution[:, 0]
            below = free & (found <= 0)
            if not below.any():
                solution = found
                break
            # Move towards the new solution until the first constant reaches zero.
            way = (solution[below] / (solution[below] - found[below])).min()
            solution = (solution + way * (found - solution)).clamp_min(0)
            free &= solution > 1e-14
            solution[~free] = 0
    return solution


def _dot(constants: Mapping[str, float], work: Mapping[str, float]) -> float:
    return sum(constants.get(name, 0.0) * count for name, count in work.items())
