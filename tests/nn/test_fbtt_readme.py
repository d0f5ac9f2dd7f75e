"""The examples of FBTT-Embedding's README run, or their nearest valid versions."""

from __future__ import annotations

import pytest
import torch

from tests.support.tensor_train import assert_near
from torchrec_hkv import OptimType, TTEmbeddingBag


@pytest.mark.parametrize("weight_dist", ["uniform", "normal", "approx-uniform", "approx-normal"])
def test_initialization(weight_dist):
    tt_emb = TTEmbeddingBag(
        num_embeddings=1000000,
        embedding_dim=64,
        tt_p_shapes=[120, 90, 110],
        tt_q_shapes=[4, 4, 4],
        tt_ranks=[12, 14],
        sparse=False,
        use_cache=False,
        weight_dist=weight_dist,
    )
    # The README's second core should be 12 x 90 x 4 x 14, as the next rank is 14.
    assert [core.numel() for core in tt_emb.tt_cores] == [
        1 * 120 * 4 * 12,
        12 * 90 * 4 * 14,
        14 * 110 * 4 * 1,
    ]


def test_bags():
    # The README passes tt_ranks by keyword after two positional Nones, which its own signature does
    # not allow; and its ids are for ten rows of three columns.
    embedding_sum = TTEmbeddingBag(
        10, 3, tt_ranks=[2, 2], tt_p_shapes=None, tt_q_shapes=None, sparse=False, use_cache=False
    )
    input = torch.LongTensor([1, 2, 4, 5, 4, 3, 2, 9])
    offsets = torch.LongTensor([0, 4])
    out = embedding_sum(input, offsets)
    table = embedding_sum.full_weight()
    assert table.shape == (10, 3)
    assert_near(out, torch.stack([table[input[:4]].sum(0), table[input[4:]].sum(0)]))


def test_fused_kernel():
    tt_emb = TTEmbeddingBag(
        num_embeddings=1000000,
        embedding_dim=64,
        tt_p_shapes=[120, 90, 110],
        tt_q_shapes=[4, 4, 4],
        tt_ranks=[12, 14],
        sparse=True,
        optimizer=OptimType.SGD,
        learning_rate=0.05,
        eps=1.0e-10,  # for ADAGRAD only
        use_cache=False,
    )
    ids, offsets = torch.randint(0, 1000000, (100,)), torch.arange(0, 100, 10)
    before = [core.clone() for core in tt_emb.tt_cores]
    tt_emb(ids, offsets).sum().backward()
    assert all(core.grad is None for core in tt_emb.tt_cores)
    assert all(not torch.equal(a, b) for a, b in zip(before, tt_emb.tt_cores, strict=True))


def test_software_cache():
    tt_emb = TTEmbeddingBag(
        num_embeddings=1000000,
        embedding_dim=64,
        tt_p_shapes=[120, 90, 110],
        tt_q_shapes=[4, 4, 4],
        tt_ranks=[12, 14],
        sparse=True,
        optimizer=OptimType.SGD,
        learning_rate=0.05,
        eps=1.0e-10,  # for ADAGRAD only
        use_cache=True,
        cache_size=1000,
        hashtbl_size=1000,
    )
    ids, offsets = torch.randint(0, 800, (400,)), torch.arange(0, 400, 10)
    before = tt_emb(ids, offsets)
    tt_emb.cache_populate()
    assert_near(tt_emb(ids, offsets), before)
    assert 0 < tt_emb.cache_hit_rate < 1
    tt_emb.reset_cache_hit_rate()
    tt_emb(ids, offsets).sum().backward()
    assert tt_emb.cache_hit_rate == 1
