"""An exported model gives the outputs of the trainer's evaluation."""

from __future__ import annotations

import pytest
import torch

from tests.support.served_models import SEEDS, exported, random_batch
from torchrec_hkv import serving


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_equal_bits(sharding, run_ranks, tmp_path):
    want = run_ranks(1, exported, tmp_path / "model", sharding)[0]
    model = serving.load(tmp_path / "model", verify=True)
    for seed, outputs in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        assert got.keys() == outputs.keys()
        for key, value in outputs.items():
            assert torch.equal(got[key], value), key
    counters = model.counters()
    assert counters["ebc.embedding_bags.user"]["unknown"] > 0
    assert counters["ebc.embedding_bags.country"]["unknown"] == 0
    assert counters["ebc.embedding_bags.country"]["lookups"] > 0


@pytest.mark.slow
def test_rows_trained_in_8_bits(run_ranks, tmp_path):
    """Served as float32, so that outputs equal the trainer's."""
    want = run_ranks(1, exported, tmp_path / "model", "row_wise", None, 4, torch.int8)[0]
    model = serving.load(tmp_path / "model", verify=True)
    for seed, outputs in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        for key, value in outputs.items():
            assert torch.equal(got[key], value), key


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_two_ranks(sharding, run_ranks, tmp_path):
    """Bit for bit if table-wise; row-wise, ranks sum their parts of a bag in another order."""
    want = run_ranks(2, exported, tmp_path / "model", sharding)
    model = serving.load(tmp_path / "model")
    for of_rank in want:
        for seed, outputs in zip(SEEDS, of_rank, strict=True):
            got = model(*random_batch(seed, 2 + seed))["made_of"]
            if sharding == "table_wise":
                assert torch.equal(got, outputs["made_of"])
            torch.testing.assert_close(got, outputs["made_of"], rtol=1e-5, atol=1e-6)


def exported_twice(rank, world_size, device, folder):
    exported(rank, world_size, device, folder, steps=1)
    return exported(rank, world_size, device, folder, steps=3)


@pytest.mark.slow
def test_replaces_a_model(run_ranks, tmp_path):
    want = run_ranks(1, exported_twice, tmp_path / "model")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    got = serving.load(tmp_path / "model")(*random_batch(1, 3))
    assert torch.equal(got["scores"], want[0]["scores"])
