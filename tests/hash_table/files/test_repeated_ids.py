"""repeated_id finds a repeated id within the memory that it is given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_hkv.hash_table.files.counts import mix64
from torchrec_hkv.hash_table.files.unique_ids import repeated_id

INT64 = st.integers(-(2**63), 2**63 - 1)


def found(ids: list[int], batch_bytes: int, batch: int = 100) -> int | None:
    tensor = torch.tensor(ids, dtype=torch.int64)
    return repeated_id(lambda: tensor.split(batch) if ids else (), len(ids), batch_bytes)


@given(st.lists(INT64, max_size=40), st.integers(1, 50))
def test_as_a_set_would(ids, batch):
    repeats = {id_ for id_ in ids if ids.count(id_) > 1}
    answer = found(ids, 1, batch)
    assert answer in repeats if repeats else answer is None


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_in_parts(n):
    generator = torch.Generator().manual_seed(n)
    size = 4096 * 3 + n
    ids = torch.randperm(1 << 16, generator=generator)[:size].sub(1 << 15).tolist()
    assert found(ids, 1, 1000) is None
    ids[size // 2] = ids[-1]
    assert found(ids, 1, 1000) == ids[-1]


@pytest.mark.parametrize("repeated", [0, -1, 2**63 - 1, -(2**63)])
def test_ids_that_could_be_marks(repeated):
    ids = [*range(1, 9000), *range(-9000, -1), 0, -1, 2**63 - 1, -(2**63)]
    for batch_bytes in (1, 1 << 20):
        assert found(ids, batch_bytes) is None
        assert found([*ids, repeated], batch_bytes) == repeated


def test_one_id_alone_more_often_than_fits():
    assert found([5] * 20_000, 1, 1000) == 5


def test_ids_that_share_a_part_are_split_further():
    """Hashes with a common prefix put all ids into one part, which must be split again."""
    ids = torch.arange(1 << 19)
    alike = ids[mix64(ids) >> 59 & 31 == 7].tolist()[:12_000]
    assert len(alike) == 12_000
    assert found(alike, 1, 1000) is None
    assert found([*alike, alike[3]], 1, 1000) == alike[3]
