"""A table whose rows the loss does not use is not trained, also by decay and momentum."""

import pytest
import torch

from tests.support.embeddings import make_tables
from torchrec_hkv import HKVAdagrad, HKVAdamOptimizer, HKVOptimizer, HKVSparseAdam

OPTIMIZERS = {
    "sgd": lambda e: HKVOptimizer(e, lr=0.1, weight_decay=0.1),
    "adagrad": lambda e: HKVAdagrad(e, lr=0.1, weight_decay=0.1),
    "adam": lambda e: HKVAdamOptimizer(e, lr=0.1),
    "sparse_adam": lambda e: HKVSparseAdam(e, lr=0.1),
}


def _rows(embedding, ids):
    with torch.no_grad():
        return [rows.cpu().clone() for rows in embedding(ids)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("buffer", [1.0, 1e-6])
def test_rows_stay(optimizer, buffer, device_type):
    embedding = make_tables(3, 4, device_type, grad_buffer_hbm_gb=buffer)
    optimizer = OPTIMIZERS[optimizer]([embedding])
    ids = [torch.arange(n, device=device_type) for n in (5, 3, 4)]
    sum(rows.sum() for rows in embedding(ids)).backward()  # fills the states
    optimizer.step()
    before = _rows(embedding, ids)
    first, _, last = embedding(ids)
    (first[:2].sum() + last.square().sum()).backward()
    embedding(ids)[0][:2].sum().backward()
    optimizer.step()
    after = _rows(embedding, ids)
    assert after[1].equal(before[1])
    assert not after[0].equal(before[0])
    assert not after[2].equal(before[2])
