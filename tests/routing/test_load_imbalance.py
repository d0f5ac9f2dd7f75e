"""No rank keeps or reads over 5 % more rows than the mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.ids import hashed, power_law
from benchmarks.load_imbalance import read
from tests.support.example_runs import shared_file
from torchrec_hkv.hash_table import bucketize

LIMIT = 0.05
#: Distinct ids of a log's columns as in click logs: few in some columns, many in most.
COLUMNS = (19_000, 5_700, 7_700, 2_200, 3, 4_500, 900, 22, 17_000, 12_000, 50, 21_000, 13_000)


def imbalance(
    tables: list[Tensor], world_size: int, device_type: str, block_size: int = 0
) -> float:
    """``(most - mean) / mean`` of the ids that ranks get from the op that sends them."""
    lengths = torch.tensor([ids.numel() for ids in tables], device=device_type)
    blocks = torch.full((len(tables),), block_size, device=device_type)
    values = torch.cat(tables).to(device_type)
    sent = bucketize(lengths, values, blocks, world_size)[0].view(world_size, -1).sum(1).double()
    assert int(sent.sum()) == values.numel()
    return float((sent.max() - sent.mean()) / sent.mean())


def real_like() -> list[Tensor]:
    """Columns of hashed ids by a power law; 7 in 100 are -1, a missing value."""
    columns = []
    for column, size in enumerate(COLUMNS):
        torch.manual_seed(column)
        names = torch.randint(1 << 40, (size,))
        ids = names[power_law(60_000, size, 1.05, torch.device("cpu"))]
        columns.append(ids.where(torch.rand(60_000) >= 0.07, -1))
    return columns


def batch_rows(columns: list[Tensor], batch: int) -> list[Tensor]:
    """The distinct ids of each batch and column."""
    return [part.unique() for column in columns for part in column.split(batch)]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(torch.arange(100_000), id="sequential"),
        pytest.param(torch.arange(-50_000, 50_000), id="sequential around 0"),
        *(
            pytest.param(torch.arange(100_000) << k, id=f"strided 2^{k}")
            for k in (1, 6, 16, 32, 46)
        ),
        pytest.param(hashed(torch.arange(100_000)), id="hashed"),
    ],
)
def test_made_up_ids(device_type, ids, world_size):
    assert imbalance([ids], world_size, device_type) <= LIMIT


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_rows_and_batches_of_a_log(device_type, world_size):
    columns = real_like()
    assert imbalance(batch_rows(columns, 60_000), world_size, device_type) <= LIMIT
    assert imbalance(batch_rows(columns, 8192), world_size, device_type) <= LIMIT


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", ["criteo_clicks_60k.npz", "movietweetings_100k.dat"])
def test_rows_and_batches_of_a_real_log(device_type, name, world_size):
    columns = read(shared_file(name))
    assert imbalance(batch_rows(columns, 1 << 20), world_size, device_type) <= LIMIT
    assert imbalance(batch_rows(columns, 8192), world_size, device_type) <= LIMIT


def test_what_blocks_of_row_numbers_would_do(device_type):
    """The measure detects that blocks of row numbers send all ids to one rank."""
    assert imbalance([torch.arange(1000)], 8, device_type, block_size=1000) == 7
