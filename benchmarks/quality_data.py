"""MovieTweetings as a click log, and the AUC of predictions on its test part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_LIKED = 8
_SECONDS_A_DAY = 86400
_TRAIN_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Rows in order of time. The first rows are for training, the others are the test.

    Attributes:
        ids: int64 ``[rows]`` for each column, from 0 to the column's ``sizes`` - 1.
        sizes: number of ids of each column.
        dense: float32 ``[rows, 4]``, hour of day and day of week as points on circles.
        labels: float32 ``[rows]``, 0 or 1.
        train: number of training rows.
        end: number of all rows.
    """

    ids: dict[str, Tensor]
    sizes: dict[str, int]
    dense: Tensor
    labels: Tensor
    train: int
    end: int

    def for_validation(self) -> Ratings:
        """Splits the training rows again: their last fifth is the test."""
        return dataclasses.replace(self, train=int(_TRAIN_SHARE * self.train), end=self.train)

    @property
    def test_labels(self) -> Tensor:
        """Returns the labels of the test rows."""
        return self.labels[self.train : self.end]


def read_ratings(path: Path, limit: int | None = None) -> Ratings:
    """Reads ``user::movie::rating::seconds`` lines.

    Args:
        path: path of the file.
        limit: number of earliest rows to keep; all by default.

    Raises:
        ValueError: a line does not have four numbers.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = line.split("::")
        if len(words) != 4 or not all(word.isdigit() for word in words):
            raise ValueError(
                f"{path.name} must have four numbers a row (user, movie, rating, seconds), and row "
                f"{number} is {line[:60]!r}."
            )
        rows.append([int(word) for word in words])
    table = torch.tensor(rows, dtype=torch.int64)
    table = table[torch.argsort(table[:, 3], stable=True)][:limit]
    user, movie, rating, seconds = table.T
    columns = {"user": user, "movie": movie, "hour": seconds % _SECONDS_A_DAY // 3600}
    numbered = {name: torch.unique(ids, return_inverse=True) for name, ids in columns.items()}
    day = 2 * torch.pi * (seconds % _SECONDS_A_DAY) / _SECONDS_A_DAY
    week = 2 * torch.pi * (seconds // _SECONDS_A_DAY % 7) / 7
    return Ratings(
        ids={name: numbers for name, (_, numbers) in numbered.items()},
        sizes={name: distinct.numel() for name, (distinct, _) in numbered.items()},
        dense=torch.stack([day.sin(), day.cos(), week.sin(), week.cos()], dim=1).float(),
        labels=(rating >= _LIKED).float(),
        train=int(_TRAIN_SHARE * len(table)),
        end=len(table),
    )


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Computes the area under the ROC curve. Equal scores count half. NaN if all labels are equal.

    Args:
        scores: predictions, ``[n]``.
        labels: ``[n]``, 0 or 1.
        weights: ``[n]``, how often each row counts; 1 by default.
    """
    weights = torch.ones(scores.numel(), dtype=torch.float64) if weights is None else weights
    distinct, of = torch.unique(scores, return_inverse=True)
    zeros = torch.zeros(distinct.numel(), dtype=torch.float64)
    clicks = zeros.index_add(0, of, weights * labels)
    others = zeros.index_add(0, of, weights * (1 - labels))
    below = others.cumsum(0) - others / 2
    return float((clicks * below).sum() / (clicks.sum() * others.sum()))


def bootstrap(
    log: Ratings, runs: Sequence[Tensor], resamples: int
) -> tuple[float, float, float, float]:
    """Returns the test AUC: mean over runs, standard deviation, and 95 % interval of the mean.

    Users are drawn with replacement together with all of their rows, which depend on each other.

    Args:
        log: the log of the test rows.
        runs: scores ``[test rows]`` of each run.
        resamples: number of resamples.
    """
    labels = log.test_labels.double()
    aucs = torch.tensor([auc(scores, labels) for scores in runs], dtype=torch.float64)
    users = log.ids["user"][log.train : log.end].unique(return_inverse=True)[1]
    count = int(users.max()) + 1
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(resamples):
        drawn = torch.randint(0, count, (count,), generator=generator)
        weights = torch.bincount(drawn, minlength=count).double()[users]
        means.append(sum(auc(scores, labels, weights) for scores in runs) / len(runs))
    low, high = torch.tensor(means, dtype=torch.float64).quantile(
        torch.tensor([0.025, 0.975], dtype=torch.float64)
    )
    return float(aucs.mean()), float(aucs.std()), float(low), float(high)
