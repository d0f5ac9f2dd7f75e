"""Cores reconstruct the dense table, whole or by rows, block by block."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.tensor_train import TTShape, dense_blocks, rows_of, to_dense

SHAPE = TTShape(490, 12, (7, 8, 9), (2, 2, 3), (5, 6))


def test_whole_and_by_rows(device_type):
    cores = tt.random_cores(SHAPE, device_type)
    table = tt.dense_table(SHAPE, cores)
    tt.assert_near(to_dense(SHAPE, cores), table)
    tt.assert_near(to_dense(SHAPE, cores, 100, 130), table[100:130])
    assert to_dense(SHAPE, cores, 7, 7).shape == (0, 12)
    ids = torch.randint(0, 490, (3, 5), device=device_type)
    tt.assert_near(rows_of(SHAPE, cores, ids), table[ids])


def test_blocks_are_bounded():
    cores = tt.random_cores(SHAPE)
    table = tt.dense_table(SHAPE, cores)
    firsts = []
    for first, rows in dense_blocks(SHAPE, cores, 3, 488, block_bytes=10 * 12 * 4):
        assert rows.shape[0] <= 10
        tt.assert_near(rows, table[first : first + rows.shape[0]])
        firsts.append(first)
    assert firsts == list(range(3, 488, 10))


@pytest.mark.parametrize("span", [(-1, 3), (4, 3), (0, 491)])
def test_refused_ranges(span):
    with pytest.raises(ValueError, match="table has rows 0 to 490"):
        to_dense(SHAPE, tt.random_cores(SHAPE), *span)
