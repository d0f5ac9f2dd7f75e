"""A checkpoint of a table under LRU, LFU or AgedLFU loads into a table under any of them."""

import pytest

from tests.support.checkpoint_models import evaluate, make_tables, train
from torchrec_hkv import AgedLFU, checkpoint

POLICIES = ("lfu", "lru", AgedLFU(2.0), "adaptive")


def _load_in_turn(rank, world_size, device, folder):
    rows = []
    for turn in range(len(POLICIES) + 1):
        eviction = POLICIES[turn % len(POLICIES)]
        model = make_tables(world_size, device, "row_wise", "adagrad", eviction=eviction)
        if turn == 0:
            train(model, rank, device, range(4))
        else:
            checkpoint.load(folder / f"{turn - 1}", model)
        rows.append(evaluate(model, device))
        checkpoint.save(folder / f"{turn}", model)
    train(model, rank, device, range(4, 6))
    return [its.equal(rows[0]) for its in rows]


@pytest.mark.slow
def test_rows_come_along(run_ranks, tmp_path):
    for equal in run_ranks(2, _load_in_turn, tmp_path):
        assert all(equal)
