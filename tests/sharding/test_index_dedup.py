"""Each distinct id of a table is sent once: agrees with Python sets."""

from __future__ import annotations

import torch
from torchrec import KeyedJaggedTensor

from tests.support.batches import INT64_MAX, INT64_MIN, random_ids
from torchrec_hkv.sharding.dists.index_dedup import deduplicate


def _check(values, lengths, features_per_table):
    keys = [f"f{i}" for i in range(sum(features_per_table))]
    features = KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
    reduced, places = deduplicate(features, features_per_table)
    assert torch.equal(reduced.values()[places], values)
    assert reduced.keys() == keys
    assert reduced.stride() == features.stride()
    feature = 0
    for count in features_per_table:
        names = keys[feature : feature + count]
        wanted = [id_ for name in names for id_ in features[name].values().tolist()]
        got = [id_ for name in names for id_ in reduced[name].values().tolist()]
        assert len(got) == len(set(got))
        assert set(got) == set(wanted)
        feature += count


def test_features_of_a_table_share_their_ids():
    for seed in range(5):
        torch.manual_seed(seed)
        pool = torch.cat([random_ids(6), torch.tensor([INT64_MIN, INT64_MAX, -1, 0])])
        lengths = torch.randint(0, 4, (5 * 7,))
        values = pool[torch.randint(0, len(pool), (int(lengths.sum()),))]
        _check(values, lengths, [2, 1, 2])


def test_nothing_at_all():
    _check(torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64), [1, 2])
