"""Curves of the quality that is lost when a table keeps only a share of its size."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

from torchrec_hkv.backends.protocol import Kept

#: What a table may give up, see :class:`torchrec_hkv.backends.Kept`.
KINDS: tuple[str, ...] = get_args(get_type_hints(Kept)["kind"])


@dataclasses.dataclass(frozen=True)
class QualityCurve:
    """The quality that a table loses as a function of the share that it keeps.

    Between points, and beyond the last one, the loss is linear in the logarithm of the share. It is
    0 at a share of 1.

    Attributes:
        points: pairs (share kept, loss) in any order. Shares are between 0 and 1, exclusive. Losses
            are not negative, in the unit of the model's metric (AUC for the built-in curves), and
            must not decrease as the share decreases.

    Raises:
        ValueError: there are no points, or one is invalid.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = self.points
        if not isinstance(points, Sequence) or isinstance(points, (str, bytes)) or not points:
            raise ValueError(
                f"QualityCurve: points are {points!r}, but must be a sequence of at least one pair "
                "(share kept, loss)."
            )
        for pair in points:
            if not _is_point(pair):
                raise ValueError(
                    f"QualityCurve: a point is {pair!r}, but must be a pair of a share between 0 "
                    "and 1, exclusive, and a finite loss of at least 0."
                )
        ordered = sorted(((float(share), float(loss)) for share, loss in points), reverse=True)
        for (share, loss), (next_share, next_loss) in itertools.pairwise(ordered):
            if next_share == share or next_loss < loss:
                raise ValueError(
                    f"QualityCurve: the loss is {loss} at a share of {share} and {next_loss} at "
                    f"{next_share}, but shares must differ, and the loss must not decrease as the "
                    "share decreases."
                )
        object.__setattr__(self, "points", tuple(ordered))

    @classmethod
    def of_csv(cls, path: str | os.PathLike[str], variant: str = "plain") -> QualityCurve:
        """Makes a curve of the AUC that Tensor-Train tables lose compared with dense ones.

        Args:
            path: a file written by ``python -m benchmarks.tensor_train_quality --out``.
            variant: a value in the column ``variant``.

        Raises:
            OSError: the file can't be read.
            ValueError: it has no rows of the variant, or none of ``dense``.
        """
        with Path(path).open(newline="") as file:
            rows = list(csv.DictReader(file))
        wanted = ("variant", "ratio", "auc")
        if not rows or any(rows[0].get(name) is None for name in wanted):
            raise ValueError(f"{path} must have the columns {', '.join(wanted)} and a row.")
        dense = [float(row["auc"]) for row in rows if row["variant"] == "dense"]
        of_variant = [row for row in rows if row["variant"] == variant]
        if not dense or not of_variant:
            found = sorted({row["variant"] for row in rows})
            raise ValueError(
                f"{path} has variants {found}, but 'dense' and {variant!r} are needed."
            )
        return cls(
            tuple(
                (1 / float(row["ratio"]), max(dense[0] - float(row["auc"]), 0.0))
                for row in of_variant
            )
        )

    def loss(self, share: float) -> float:
        """The loss when a share is kept.

        Args:
            share: greater than 0; 1 and more have no loss.
        """
        if share >= 1:
            return 0.0
        points = [(0.0, 0.0), *((-math.log(kept_share), loss) for kept_share, loss in self.points)]
        given_up = -math.log(share)
        upper = next((i for i, (at, _) in enumerate(points) if at >= given_up), len(points) - 1)
        (x0, y0), (x1, y1) = points[upper - 1], points[upper]
        return y0 + (y1 - y0) * (given_up - x0) / (x1 - x0)


def _is_point(pair: object) -> bool:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return False
    if any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in pair):
        return False
    return 0 < pair[0] < 1 and 0 <= pair[1] < math.inf


#: AUC lost on MovieTweetings when users and movies are reduced alike. Compression:
#: docs/performance/tensor_train.md. Rows and precision: one pass in time order with LFU
#: (docs/concepts/planner.md).
MEASURED: dict[str, QualityCurve] = {
    "compression": QualityCurve(((1 / 5.12, 0.0245), (1 / 21.4, 0.0418), (1 / 117, 0.0853))),
    "rows": QualityCurve(((0.927, 0.0012), (0.826, 0.0083), (0.650, 0.0332), (0.519, 0.0644))),
    "precision": QualityCurve(((0.5, 0.0002),)),
}


def check_loss(what: str, value: object) -> None:
    """Checks a bound on losses.

    Raises:
        ValueError: it is neither None nor a finite number of at least 0.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < math.inf):
        raise ValueError(
            f"{what} is {value!r}, but must be a finite number of at least 0, or None."
        )


def check_time(what: str, value: object) -> None:
    """Checks a bound on time.

    Raises:
        ValueError: it is neither None nor a positive finite number.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ValueError(
            f"{what} is {value!r}, but must be a finite number of milliseconds above 0, or None."
        )


def check_curves(what: str, curves: object) -> None:
    """Checks quality curves by kind.

    Raises:
        ValueError: ``curves`` is not a mapping from kinds to curves.
    """
    if not isinstance(curves, Mapping) or not all(
        kind in KINDS and isinstance(curve, QualityCurve) for kind, curve in curves.items()
    ):
        raise ValueError(
            f"{what} is {curves!r}, but must be None or a dictionary of QualityCurve by "
            f"{', '.join(map(repr, KINDS))}."
        )
