"""What a served model takes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.support.served_models import BAGS, SEQUENCE, WEIGHTED, as_ids, random_batch
from torchrec_hkv import serving
from torchrec_hkv.serving.tracing import describe_inputs


@pytest.mark.slow
def test_requests(served):
    model = serving.load(served[0])
    assert model.features == ((*BAGS, *SEQUENCE), tuple(WEIGHTED))
    dense, features, weighted = random_batch(5, 4)
    want = model(dense, features, weighted)
    # int32, another order of features, and more of them
    keys, values, lengths, _ = as_ids(features)
    counts = lengths.sum(1).tolist()
    parts, numbers = values.split(counts), [6, 2, 0, 1, 3, 5, 4]
    shuffled = serving.KeyedIds(
        [*(keys[n] for n in numbers), "more"],
        torch.cat([*(parts[n] for n in numbers), torch.tensor([3] * 4)]),
        torch.cat([lengths[numbers], torch.ones(1, 4, dtype=torch.int64)]).int(),
    )
    got = model(dense, shuffled, serving.KeyedIds(*as_ids(weighted)))
    assert all(torch.equal(got[key], value) for key, value in want.items())
    # none, one, and many samples
    for samples in (0, 1, 300):
        got = model(*random_batch(6, samples))
        assert got["scores"].shape == (samples, 3)
    million = torch.arange(1 << 40, (1 << 40) + 1_000_000)
    lengths = torch.zeros(len(keys), 2, dtype=torch.int64)
    lengths[0, 1] = million.numel()
    out = model(torch.zeros(2, 4), serving.KeyedIds(keys, million, lengths), random_batch(1, 2)[2])
    assert bool(out["scores"].isfinite().all())
    assert model.counters()["ebc.embedding_bags.user"]["unknown"] >= 1_000_000


def test_bad_requests(served):
    model = serving.load(served[0])
    dense, features, weighted = random_batch(5, 4)
    keys, values, lengths, _ = as_ids(features)
    ids = serving.KeyedIds
    with pytest.raises(
        TypeError, match=r"values are torch\.float32, but must be a tensor of integers of 8 to 64"
    ):
        ids(keys, values.float(), lengths)
    with pytest.raises(ValueError, match=r"lengths must have shape \[7, samples\]"):
        ids(keys, values, lengths[1:])
    with pytest.raises(ValueError, match=r"ids lack the features \['user'\]"):
        model(dense, ids(keys[1:], values, lengths[1:]), weighted)
    with pytest.raises(ValueError, match="ids have no weights"):
        model(dense, features, ids(weighted.keys(), weighted.values(), as_ids(weighted)[2]))
    with pytest.raises(ValueError, match="lengths add up to"):
        model(dense, ids(keys, values[1:], lengths), weighted)
    with pytest.raises(ValueError, match="lengths must not be negative"):
        model(dense, ids(keys, values, -lengths), weighted)
    negative = torch.cat([lengths[:1] - 9, lengths[1:2] + 9, lengths[2:]])
    with pytest.raises(ValueError, match="lengths must not be negative, but one is -"):
        model(dense, ids(keys[::-1], values, negative), weighted)
    with pytest.raises(ValueError, match="another structure"):
        model(dense, features)
    with pytest.raises(TypeError, match="ids are a int, but must be a KeyedIds"):
        model(dense, 3, weighted)
    with pytest.raises(TypeError, match=r"args\[0\] is a list, but must be a tensor"):
        model([1.0], features, weighted)


def test_different_numbers_of_samples(served):
    """Lengths of other strides, though they would fill [features, samples]."""
    model = serving.load(served[0])
    dense, features, weighted = random_batch(5, 4)
    strides = [[3], [5], *[[4]] * (len(features.keys()) - 2)]
    ragged = KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=strides,
    )
    with pytest.raises(ValueError, match="have different numbers of samples"):
        model(dense, ragged, weighted)
    with pytest.raises(ValueError, match="have different numbers of samples"):
        describe_inputs((dense, ragged, weighted), {})


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.uint64])
def test_integer_dtypes(dtype, served):
    """As in training, a uint64 id is the int64 with the same bits."""
    model = serving.load(served[0])
    dense, features, weighted = random_batch(5, 4)
    ids = features.values()
    ids = ids.view(dtype) if dtype == torch.uint64 else (ids % 50).to(dtype)
    given = KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())
    own = ids.view(torch.int64) if dtype == torch.uint64 else ids.long()
    want = model(
        dense, KeyedJaggedTensor(features.keys(), own, lengths=features.lengths()), weighted
    )
    got = model(dense, given, weighted)
    assert all(torch.equal(got[key], value) for key, value in want.items())
    assert torch.equal(describe_inputs((given,), {})[2][0], own)


def test_arguments_by_name(served):
    model = serving.load(served[0])
    dense, features, weighted = random_batch(5, 4)
    want = model(dense, features, weighted)
    for args, kwargs in (
        ((dense,), {"weighted": weighted, "features": features}),
        ((), {"dense": dense, "weighted": weighted, "features": features}),
    ):
        got = model(*args, **kwargs)
        assert all(torch.equal(got[key], value) for key, value in want.items())
    for kwargs in ({"features": features}, {"features": features, "other": weighted}):
        with pytest.raises(ValueError, match="another structure"):
            model(dense, **kwargs)


def test_dense_of_wrong_dtype_or_shape(served):
    model = serving.load(served[0])
    dense, features, weighted = random_batch(5, 4)
    with pytest.raises(TypeError, match=r"args\[0\] is of dtype torch.float64, but must be"):
        model(dense.double(), features, weighted)
    with pytest.raises(ValueError, match=r"args\[0\] has shape \(4, 3\), but must have shape"):
        model(dense[:, :3], features, weighted)
    with pytest.raises(ValueError, match=r"args\[0\] and lengths of args\[1\] don't fit"):
        model(dense[:3], features, weighted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_no_gpu(served):
    with pytest.raises(ValueError, match="device is 'cuda', but this process has no CUDA GPU"):
        serving.load(served[0], device="cuda")


def test_lists():
    got = serving.KeyedIds.from_lists({"a": [[-(2**63), 2**63 - 1], []], "b": [[7], [True]]})
    assert got.values.tolist() == [-(2**63), 2**63 - 1, 7, 1]
    assert got.values.dtype == torch.int64
    assert got.lengths.tolist() == [[2, 0], [1, 1]]
    assert serving.KeyedIds.from_lists({"a": [[], []]}).values.shape == (0,)


@pytest.mark.parametrize("bad", [[1, 2], torch.tensor([1, 2]), 3])
def test_ids_that_are_no_lists_of_samples(bad):
    with pytest.raises(TypeError, match=r"ids of feature 'a' must be lists of the ids of each"):
        serving.KeyedIds.from_lists({"a": bad})


@pytest.mark.parametrize("bad", [2**63, -(2**63) - 1, 1.5, "7", None])
def test_bad_ids_in_lists(bad):
    with pytest.raises(ValueError, match=r"an id is .*, but must be an integer from -2\^63"):
        serving.KeyedIds.from_lists({"a": [[1, bad, 2]]})
