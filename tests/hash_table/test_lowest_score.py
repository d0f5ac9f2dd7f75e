"""Which entry leaves a full bucket, for extreme scores, ties and bucket sizes: agrees with a
model."""

import pytest
import torch

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.tables import make, scores_of, scores_tensor
from torchrec_hkv.hash_table import AgedLFU

COUNTS = [0, 1, 2, 3, 7, 2**31 + 5, 2**52 - 1, 2**52, 2**62, 2**63 - 1]
#: A CPU ranks counts below 8 or 16 first, then those below 128, then those with few more bits.
LIMITS = [6, 7, 8, 9, 15, 16, 100, 126, 127, 128, 129, 255, 256, 3 * 2**15]
HIGH = [128, 129, 200, 255, 256, 3 * 2**15, 2**23 - 32769, 2**23 - 32768, 2**23, 2**40]
SCORES = [-(2**63), 1 - 2**63, -1, 0, 1, 2**31, 2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 31, 60, 61, 63, 64])
@pytest.mark.parametrize("policy", ["lfu", "customized", AgedLFU(0.0), AgedLFU(0.02), AgedLFU(1.5)])
@pytest.mark.parametrize("counts", [COUNTS, LIMITS, COUNTS + LIMITS, HIGH, HIGH[:5]])
def test_the_lowest_of_a_bucket_leaves(device_type, capacity, policy, counts):
    table = make(device_type, capacity, dim=1, eviction=policy)
    aged = AgedLFUModel(policy.c) if isinstance(policy, AgedLFU) else None
    pool = SCORES if policy == "customized" else counts
    entries: dict[int, tuple[int, int]] = {}  # id to score and last step

    def rank(score: int, step: int) -> int:
        return score if aged is None else aged.rank(score, step)

    def place(id_: int, score: int, call: int) -> None:
        ids, given = torch.tensor([id_], device=device_type), scores_tensor([score], device_type)
        table.find_or_insert(ids, given)
        if aged is not None:
            aged.begin_call(call, call - 1, capacity)
        if len(entries) == capacity:
            ranks = {each: (rank(*entry), entry[1]) for each, entry in entries.items()}
            lowest = min(ranks, key=ranks.__getitem__)
            if rank(score, call) < ranks[lowest][0]:
                return  # refused
            del entries[lowest]
        entries[id_] = (score, call)

    for call in range(1, 3 * capacity + 10):
        place(call, pool[int(torch.randint(len(pool), (1,)))], call)
    assert scores_of(table) == {id_: score for id_, (score, _) in entries.items()}


def test_a_score_of_all_bits_leaves_where_the_others_are_pinned(device_type):
    # The search marks excluded slots by the highest score.
    table = make(device_type, 8, dim=1, eviction="customized")
    ids = torch.arange(8, device=device_type)
    table.find_or_insert(ids, scores_tensor([2**63 - 1] * 8, device_type))
    batch = torch.tensor([0, 1, 2, 4, 5, 6, 7, 100], device=device_type)
    table.find_or_insert(batch, scores_tensor([2**63 - 1] * 8, device_type))
    assert set(scores_of(table)) == set(batch.tolist())
