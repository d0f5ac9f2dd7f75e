"""Streams of clicks in order of time, for the quality benchmark of hash tables."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ids import hashed
from benchmarks.quality_data import Ratings, read_ratings

_MOVIELENS = "recbole/dataset_example/ml-100k/ml-100k.inter"
_MOVIELENS_LIKED, _SECONDS_A_DAY = 4, 86400
_ROWS, _TENTHS, _LATENT, _LATENT_SD = 120_000, 10, 4, 0.7


@dataclasses.dataclass(frozen=True)
class Stream:
    """Rows in order of time.

    Attributes:
        name: name of the stream.
        ids: int64 ``[rows]`` for each feature, any values.
        dense: float32 ``[rows, features]``.
        labels: float32 ``[rows]``, 0 or 1.
    """

    name: str
    ids: dict[str, Tensor]
    dense: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    def first(self, rows: int | None) -> Stream:
        """Returns the first rows of the stream."""
        ids = {name: values[:rows] for name, values in self.ids.items()}
        return Stream(self.name, ids, self.dense[:rows], self.labels[:rows])


@dataclasses.dataclass(frozen=True)
class SyntheticStream:
    """Parameters of a synthetic stream: positions have a fixed popularity, and in each tenth of the
    stream some positions get a new id.

    Attributes:
        name: name of the stream.
        positions: number of positions of each of the two features.
        power: the popularity of position r is ``(r + 1) ** -power``.
        replaced: probability that a position gets a new id in the next tenth.
        bias: standard deviation of an id's contribution to the logit.
    """

    name: str
    positions: int
    power: float
    replaced: float
    bias: float


TURNOVER = SyntheticStream("turnover", 6000, 0.8, 0.2, 0.8)
REPLACED = SyntheticStream("all replaced", 1500, 0.8, 1.0, 1.2)


def synthetic_stream(how: SyntheticStream, seed: int, rows: int = _ROWS) -> Stream:
    """Creates a stream whose clicks depend on a bias of each id and the interaction of two ids.

    Args:
        how: parameters of the stream.
        seed: seed of all random numbers.
        rows: number of rows of the stream.
    """
    generator = torch.Generator().manual_seed(seed)
    tenth = torch.arange(rows) * _TENTHS // rows
    logits = torch.zeros(rows)
    ids, latent = {}, torch.ones(rows, _LATENT)
    weights = (torch.arange(how.positions) + 1.0).pow(-how.power).double()
    for name in ("user", "item"):
        position = torch.multinomial(weights, rows, replacement=True, generator=generator)
        is_new = torch.rand(_TENTHS, how.positions, generator=generator) < how.replaced
        is_new[0] = False
        number = position + how.positions * is_new.cumsum(0)[tenth, position]
        count = int(number.max()) + 1
        logits += how.bias * torch.randn(count, generator=generator)[number]
        latent *= _LATENT_SD * torch.randn(count, _LATENT, generator=generator)[number]
        ids[name] = hashed(number)
    logits += latent.sum(1)
    labels = (torch.rand(rows, generator=generator) < logits.sigmoid()).float()
    return Stream(how.name, ids, torch.zeros(rows, 1), labels)


def read(path: Path) -> Stream:
    """Reads MovieTweetings (``.dat``) or MovieLens-100K (``.inter``, or the ``recbole`` wheel).

    Raises:
        ValueError: the file has another format.
    """
    if path.suffix == ".dat":
        return _ratings("MovieTweetings", read_ratings(path))
    if path.suffix not in (".whl", ".inter"):
        raise ValueError(f"{path.name} must be a .dat, .inter or .whl file.")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            text = wheel.read(_MOVIELENS).decode()
    else:
        text = path.read_text()
    lines = [line.split("\t") for line in text.splitlines()[1:]]
    table = torch.tensor([[int(float(word)) for word in line[:4]] for line in lines])
    user, movie, rating, seconds = table[torch.argsort(table[:, 3], stable=True)].T
    ids = {"user": hashed(user), "item": hashed(movie)}
    return Stream("MovieLens", ids, _times(seconds), (rating >= _MOVIELENS_LIKED).float())


def _ratings(name: str, log: Ratings) -> Stream:
    ids = {"user": hashed(log.ids["user"]), "item": hashed(log.ids["movie"])}
    return Stream(name, ids, log.dense, log.labels)


def _times(seconds: Tensor) -> Tensor:
    day = 2 * torch.pi * (seconds % _SECONDS_A_DAY) / _SECONDS_A_DAY
    week = 2 * torch.pi * (seconds // _SECONDS_A_DAY % 7) / 7
    return torch.stack([day.sin(), day.cos(), week.sin(), week.cos()], dim=1).float()
