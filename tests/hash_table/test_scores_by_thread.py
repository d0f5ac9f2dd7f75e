"""On a CPU scores equal those of sequential lookups, however threads share a batch's tables: whole
tables or pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.pairwise import pairwise
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec

IDS = 3_000
BATCH = 600
#: By case: the table of each feature, and each feature's longest bag. Two threads get a table each,
#: share the last one, or share the only one.
CASES = {
    "one table": ([0], [40]),
    "one each": ([0, 1], [30, 30]),
    "one is left over": ([0, 1, 2], [30, 30, 30]),
    "features of one table apart": ([0, 1, 0, 2, 1], [20, 1, 9, 30, 20]),
    "many of all sizes": ([*range(9)], [1, 60, 2, 7, 0, 30, 15, 4, 4]),
}


def draw(longest: list[int], skew: float) -> tuple[Tensor, Tensor]:
    """Ids and offsets. With a high skew, few ids are frequent."""
    lengths = torch.cat([torch.randint(maximum + 1, (BATCH,)) for maximum in longest])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = (IDS * torch.rand(int(offsets[-1])) ** skew).long()
    return ids * 0x9E3779B97F4A7C1 - 5, offsets


def count(score: int, _: int) -> int:
    return score + 1


def last(_: int, given: int) -> int:
    return given


#: By policy.
NEXT_SCORE = {"lfu": count, "adaptive": count, "epoch_lfu": count, "customized": last}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "policy", "skew", "threads"), pairwise(CASES, NEXT_SCORE, [1.0, 6.0], [1, 2, 5])
)
def test_scores(
    set_threads: Callable[[int], None],
    case: str,
    policy: str,
    skew: float,
    threads: int,
) -> None:
    next_score = NEXT_SCORE[policy]
    features, longest = CASES[case]
    tables = max(features) + 1
    set_threads(threads)
    torch.manual_seed(len(features) + threads)
    specs = [TableSpec(f"t{i}", 2 * IDS, 4, eviction=policy) for i in range(tables)]
    group = TableGroup(specs, features, SGD(), "cpu")
    model: list[dict[int, int]] = [{} for _ in range(tables)]
    looked_up = 0
    for _ in range(3):
        ids, offsets = draw(longest, skew)
        looked_up += len(ids)
        given = torch.randint(1, 1 << 40, ids.shape) if policy == "customized" else None
        group.find_or_insert(ids, offsets, BATCH, scores=given)
        scores = given.tolist() if given is not None else [0] * len(ids)
        for feature, table in enumerate(features):
            own = model[table]
            for at in range(int(offsets[feature * BATCH]), int(offsets[(feature + 1) * BATCH])):
                id_ = int(ids[at])
                own[id_] = next_score(own.get(id_, 0), scores[at])
    for table in range(tables):
        state = group.export_table(table)
        there = state.occupied
        kept = dict(zip(state.ids[there].tolist(), state.scores[there].tolist(), strict=True))
        if policy == "epoch_lfu":
            kept = {id_: score & 0xFFFFFFFF for id_, score in kept.items()}
        assert kept == model[table]
    assert sum(counters["lookups"] for counters in group.counters()) == looked_up
