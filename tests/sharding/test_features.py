"""The rank that gets a batch validates it before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.small_models import batch, make_small
from torchrec_hkv.sharding.dists.features import check_row_numbers, prepare_features

TABLES = [EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f", "g"])]


def _features(dtype=torch.int64, keys=("f", "g"), weights=None):
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.arange(3).to(dtype),
        lengths=torch.tensor([1, 0, 2, 0][: 2 * len(keys)]),
        weights=weights,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_narrow_ids_are_widened(dtype):
    prepared = prepare_features(_features(dtype), TABLES, is_weighted=False)
    assert prepared.values().dtype == torch.int64
    assert prepared.values().tolist() == [0, 1, 2]
    assert prepared.lengths().tolist() == [1, 0, 2, 0]
    assert prepared.stride() == 2


def test_a_good_batch_is_passed_on_as_it_is():
    features = _features()
    assert prepare_features(features, TABLES, is_weighted=False) is features
    weighted = _features(weights=torch.ones(3))
    assert prepare_features(weighted, TABLES, is_weighted=True) is weighted


def test_weights_are_used_where_the_collection_is_weighted():
    weighted = _features(weights=torch.ones(3, dtype=torch.float64))
    assert prepare_features(weighted, TABLES, is_weighted=True).weights().dtype == torch.float32
    assert prepare_features(weighted, TABLES, is_weighted=False).weights_or_none() is None


def test_batch_sizes_of_features_are_kept():
    inverse = (["f", "g"], torch.tensor([[0, 1], [0, 0]]))
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(3, dtype=torch.int32),
        lengths=torch.tensor([1, 0, 2]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=inverse,
    )
    prepared = prepare_features(features, TABLES, is_weighted=False)
    assert prepared.values().dtype == torch.int64
    assert prepared.stride_per_key_per_rank() == [[2], [1]]
    assert prepared.inverse_indices() is inverse


@pytest.mark.parametrize(
    ("features", "is_weighted", "message"),
    [
        (_features(torch.float32), False, "The ids have dtype torch.float32, but must have"),
        (_features(torch.float64), False, "The ids have dtype torch.float64, but must have"),
        (_features(torch.bool), False, "The ids have dtype torch.bool, but must have"),
        (_features(keys=("f", "h")), False, r"'g', which the batch lacks: it has \['f', 'h'\]"),
        (_features(), True, "has no weights"),
        (_features(weights=torch.ones(3, dtype=torch.int64)), True, "weights of dtype torch.int64"),
    ],
)
def test_refused(features, is_weighted, message):
    with pytest.raises(ValueError, match=message):
        prepare_features(features, TABLES, is_weighted=is_weighted)


def _int32(rank, world_size, device, sharding_type):
    model = make_small(world_size, device, "toy", sharding_type)
    outputs = []
    for dtype in (torch.int64, torch.int32 if rank == 0 else torch.int64):
        features = batch(rank, device, seed=0)
        small = KeyedJaggedTensor(
            keys=features.keys(), values=features.values() % 16, lengths=features.lengths()
        )
        small = KeyedJaggedTensor(
            keys=small.keys(), values=small.values().to(dtype), lengths=small.lengths()
        )
        outputs.append(model(small))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_one_rank_may_give_narrower_ids_than_another(run_ranks, sharding_type):
    run_ranks(2, _int32, sharding_type)


def _float(rank, world_size, device):
    model = make_small(world_size, device, "toy")
    with pytest.raises(ValueError, match=r"The ids have dtype torch\.float32"):
        model(batch(rank, device, seed=0, dtype=torch.float32))
    sizes = [lookup.counters("t")["size"] for lookup in model.module.ebc.group_lookups().values()]
    model(batch(rank, device, seed=0))
    return sizes


def test_float_ids_change_nothing(run_ranks):
    assert run_ranks(2, _float) == [[0], [0]]


def test_row_numbers_of_every_table_are_checked():
    features = _features()  # f has row 0, g has rows 1 and 2
    check_row_numbers(features, [("f", "t", 1), ("g", "t", 3), ("g", "u", 3)])
    with pytest.raises(ValueError, match=r"Table 'u' .* feature 'g', which has id 2: allowed are"):
        check_row_numbers(features, [("g", "t", 3), ("g", "u", 2), ("f", "v", 1)])
