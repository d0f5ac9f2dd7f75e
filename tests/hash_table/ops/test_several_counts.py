"""If a call to a full table has several scores for one id, the highest decides admission, and all
counts add up."""

import pytest
import torch

from tests.support.tables import distinct_ids, make, random_rows, scores_of, scores_tensor


def full(device: str, policy: str, score: int):
    table = make(device, 64, eviction=policy)
    ids = distinct_ids(66, device)
    table.find_or_insert(ids[:64], scores_tensor([score] * 64, device))
    return table, ids


@pytest.mark.parametrize("counts", [[1, 6, 2], [6, 1, 2], [1, 2, 6], [3, 3, 5]])
@pytest.mark.parametrize("policy", ["lfu", "epoch_lfu"])
def test_counts_add_up_whatever_their_order(device_type, policy, counts):
    table, ids = full(device_type, policy, 5)
    three = ids[64:65].expand(3)
    slots, found = table.find_or_insert_slots(three, scores_tensor(counts, device_type))
    assert (slots == slots[0]).all()
    assert slots[0] >= 0
    assert not found.any()
    assert scores_of(table)[int(ids[64])] == sum(counts)
    assert table.counters()["refused"] == 0


def test_refused_if_all_are_too_low(device_type):
    table, ids = full(device_type, "lfu", 5)
    three = ids[64:65].expand(3)
    slots, _ = table.find_or_insert_slots(three, scores_tensor([4, 4, 4], device_type))
    assert (slots == -1).all()  # although their sum is higher
    back = table.insert_and_evict(
        three, random_rows(table, 3), scores_tensor([1, 4, 2], device_type)
    )
    assert back.ids.tolist() == three.tolist()
    assert sorted(back.scores.tolist()) == [1, 2, 4]


def test_each_id_by_its_own_highest(device_type):
    table, ids = full(device_type, "lfu", 5)
    one, other = ids[64:65], ids[65:66]
    batch = torch.cat([one, other, one, other])
    slots, _ = table.find_or_insert_slots(batch, scores_tensor([1, 4, 9, 3], device_type))
    assert (slots >= 0).tolist() == [True, False, True, False]
    assert scores_of(table)[int(one)] == 10


@pytest.mark.parametrize("scores", [[9, 1], [1, 9]])
def test_of_customized_scores_one_stays(device_type, scores):
    table, ids = full(device_type, "customized", 5)
    slots, _ = table.find_or_insert_slots(ids[64:65].expand(2), scores_tensor(scores, device_type))
    assert (slots >= 0).all()
    score = scores_of(table)[int(ids[64])]
    assert score == scores[1] if device_type == "cpu" else score in scores
