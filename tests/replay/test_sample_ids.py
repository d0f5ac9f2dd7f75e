"""The op that samples ids agrees with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.sampled_log import groups, hashes, places
from torchrec_hkv.replay.sample import Sample, groups_of, sample_ids

sample = torch.ops.torchrec_hkv.sample_ids


def streams():
    generator = np.random.default_rng(0)
    return {
        "any": generator.integers(-(1 << 63), 1 << 63, 10_001, dtype=np.int64),
        "small": generator.integers(0, 300, 5000),
        "ends": np.array([-(1 << 63), (1 << 63) - 1, 0, -1, 1], dtype=np.int64),
        "one": np.array([7]),
        "none": np.empty(0, dtype=np.int64),
    }


@pytest.mark.parametrize("name", list(streams()))
@pytest.mark.parametrize("rates", [(0.16, 0.01), (1.0, 0.1), (0.5, 0.5), (1.0, 1.0), (1e-9, 1e-12)])
def test_as_numpy_does(name, rates):
    ids = streams()[name]
    taken = sample_ids(torch.from_numpy(ids), *map(Sample, rates))
    at, ours = places(ids, rates[0]), places(ids, rates[1])
    assert taken.positions.tolist() == at.tolist()
    assert taken.hashes.tolist() == hashes(ids[at]).tolist()
    assert taken.positions[taken.smaller].tolist() == ours.tolist()
    assert groups_of(taken.hashes[taken.smaller]).tolist() == groups(ids[ours]).tolist()
    assert taken.bounds.tolist() == ([ids.min(), ids.max()] if len(ids) else [])


def test_ids_need_not_be_contiguous():
    ids = torch.arange(1000).view(100, 10)[:, 3]
    both = (sample(ids, 0, 0), sample(ids.contiguous(), 0, 0))
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_opcheck():
    torch.library.opcheck(sample, (torch.arange(100), 1 << 60, -(1 << 60)))
    torch.library.opcheck(sample, (torch.arange(0), 0, 0))


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((torch.arange(3.0), 0, 0), TypeError, "ids must be of dtype Long, but is of dtype Float"),
        ((torch.zeros(2, 2).long(), 0, 0), ValueError, r"one dimension, but has shape \[2, 2\]"),
        ((torch.arange(3), 0, 1), ValueError, "max_sampled is 1, but must be at most"),
    ],
)
def test_bad_input(args, error, match):
    with pytest.raises(error, match=match):
        sample(*args)
