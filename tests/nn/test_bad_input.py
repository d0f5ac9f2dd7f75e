"""Modules refuse bad input with one sentence, and nothing changes."""

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables, rows_of
from torchrec_hkv import (
    HierarchicalHashEmbedding,
    HKVAdagrad,
    HKVAdamOptimizer,
    HKVOptimizer,
    HKVSparseAdam,
    MultiTableHKVEmbedding,
)

ARGUMENTS = {
    "embedding_dim is 0, but must be an integer from 1 to 2048": {"embedding_dim": 0},
    "embedding_dim is 4.0": {"embedding_dim": 4.0},
    "embedding_dim is 4096": {"embedding_dim": 4096},
    "max_capacity is 0, but must be": {"max_capacity": 0},
    "max_capacity is '9'": {"max_capacity": "9"},
    "max_capacity is 9223372036854775807": {"max_capacity": 2**63 - 1},
    "init_capacity is 101, but must be an integer from 1 to 100": {"init_capacity": 101},
    "max_hbm_gb is 0, but must be None or a positive number of GiB": {"max_hbm_gb": 0},
    "max_hbm_gb is nan": {"max_hbm_gb": float("nan")},
    "grad_buffer_hbm_gb is -1": {"grad_buffer_hbm_gb": -1},
    "grad_buffer_hbm_gb is None": {"grad_buffer_hbm_gb": None},
    "learning_rate is -0.1, but must be a finite number, not negative": {"learning_rate": -0.1},
    "weight_decay is -1": {"weight_decay": -1},
    "padding_idx is 9223372036854775808": {"padding_idx": 2**63},
    "eviction is 'fifo', but must be one of 'lru'": {"eviction": "fifo"},
    "initializer is 'normal', but must be a Uniform": {"initializer": "normal"},
    "seed is 0.5": {"seed": 0.5},
    "remember_evicted is 0, but must be a number of ids": {"remember_evicted": 0},
}


@pytest.mark.parametrize("sentence", ARGUMENTS)
def test_impossible_arguments(sentence, device_type):
    arguments = {"embedding_dim": 4, "max_capacity": 100, "device": device_type}
    with pytest.raises(ValueError, match=sentence):
        HierarchicalHashEmbedding(**{**arguments, **ARGUMENTS[sentence]})


def test_no_tables():
    with pytest.raises(ValueError, match="num_tables is 0, but must be an integer, at least 1"):
        MultiTableHKVEmbedding(0, 4, 100)


@pytest.mark.parametrize(
    ("ids", "error", "sentence"),
    [
        (torch.tensor([1.0]), TypeError, "of int64 or int32, but are torch.float32"),
        ([1, 2], TypeError, "of int64 or int32, but are list"),
        (torch.tensor([True]), TypeError, "but are torch.bool"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "ids are on meta, but the"),
    ],
)
def test_ids_that_are_none(ids, error, sentence, device_type):
    embedding = make_embedding(device=device_type)
    with pytest.raises(error, match=sentence):
        embedding(ids)
    assert embedding.counters()["embedding"]["lookups"] == 0


def test_ids_of_several_tables(device_type):
    tables = make_tables(2, device=device_type)
    ids = torch.arange(3, device=device_type)
    with pytest.raises(ValueError, match="ids have 3 tensors, but there are 2 tables"):
        tables([ids, ids, ids])
    with pytest.raises(TypeError, match="a list of one tensor for each table, but are Tensor"):
        tables(torch.stack([ids, ids]))
    with pytest.raises(TypeError, match=r"of int64 or int32, but are torch.float32"):
        tables([ids, ids.float()])
    assert tables.counters()["table_0"]["lookups"] == 0


FOREIGN = {
    "a parameter": lambda: torch.nn.Linear(2, 2).parameters(),
    "a module": lambda: torch.nn.Embedding(3, 4),
    "a list with a module": lambda: [make_embedding(), torch.nn.Embedding(3, 4)],
    "a model": lambda: torch.nn.Sequential(make_embedding()),
    "a group": lambda: [{"params": [torch.nn.Linear(2, 2)]}],
    "a number": lambda: 5,
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("optimizer", [HKVOptimizer, HKVAdamOptimizer, HKVAdagrad, HKVSparseAdam])
def test_optimizers_over_foreign_modules(what, optimizer):
    with pytest.raises(TypeError, match="must be HierarchicalHashEmbedding or MultiTableHKV"):
        optimizer(FOREIGN[what]())


def test_optimizers_over_nothing_or_the_same_twice(device_type):
    embedding = make_embedding(device=device_type)
    with pytest.raises(ValueError, match="embeddings is empty"):
        HKVOptimizer([])
    with pytest.raises(ValueError, match="hold a module more than once"):
        HKVOptimizer([embedding, embedding])
    with pytest.raises(ValueError, match="takes its embeddings at construction"):
        HKVOptimizer(embedding).add_param_group({"params": [make_embedding(device=device_type)]})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lr": -1}, "lr is -1, but must be a finite number, not negative"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"lr": None}, "lr is None"),
        ({"lr": torch.tensor(-0.5)}, "lr is -0.5"),
        ({"lr": torch.tensor(float("nan"))}, "lr is nan"),
        ({"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\), but must have one value"),
        ({"betas": (1.0, 0.9)}, "betas is"),
        ({"eps": 0}, "eps is 0"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"state_hbm_gb_per_embedding": 0}, "state_hbm_gb_per_embedding is 0, but must be None or"),
    ],
)
def test_impossible_arguments_of_an_optimizer_change_nothing(changes, sentence, device_type):
    embedding = make_embedding(device=device_type)
    before = HKVOptimizer(embedding, lr=0.5)
    with pytest.raises(ValueError, match=sentence):
        HKVAdamOptimizer(embedding, **changes)
    rows = rows_of(embedding, [1])
    embedding(torch.tensor([1], device=device_type)).sum().backward()
    before.step()  # still belongs to the embedding
    torch.testing.assert_close(rows_of(embedding, [1]), rows - 0.5)


@pytest.mark.parametrize("lr", [-1.0, float("inf"), None, torch.tensor(-1.0), torch.ones(2)])
def test_an_impossible_rate_of_one_group_trains_none(lr, device_type):
    embeddings = [make_embedding(device=device_type) for _ in range(2)]
    optimizer = HKVOptimizer([{"params": each, "lr": 0.5} for each in embeddings])
    before = [rows_of(each, [1]) for each in embeddings]
    for each in embeddings:
        each(torch.tensor([1], device=device_type)).sum().backward()
    optimizer.param_groups[1]["lr"] = lr
    with pytest.raises(ValueError, match="lr is"):
        optimizer.step()
    assert all(rows_of(e, [1]).equal(row) for e, row in zip(embeddings, before, strict=True))
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step()
    for embedding, row in zip(embeddings, before, strict=True):
        torch.testing.assert_close(rows_of(embedding, [1]), row - 0.5)


def test_unknown_values_of_a_group(device_type):
    with pytest.raises(ValueError, match=r"A group has \['momentum'\], but may have"):
        HKVOptimizer([{"params": [make_embedding(device=device_type)], "momentum": 0.9}])


def test_an_optimizer_that_was_replaced_can_not_step(device_type):
    embedding = make_embedding(device=device_type)
    old = HKVOptimizer(embedding, lr=0.5)
    new = HKVAdagrad(embedding, lr=0.5)
    before = rows_of(embedding, [1])
    embedding(torch.tensor([1], device=device_type)).sum().backward()
    with pytest.raises(RuntimeError, match="was given to another optimizer"):
        old.step()
    assert torch.equal(rows_of(embedding, [1]), before)
    new.step()
    torch.testing.assert_close(rows_of(embedding, [1]), before - 0.5)


def test_a_new_optimizer_starts_without_states(device_type):
    embedding = make_embedding(device=device_type)
    ids = torch.tensor([1], device=device_type)
    for _ in range(2):  # the second one equals the first
        optimizer = HKVAdagrad(embedding, lr=0.5)
        before = rows_of(embedding, [1])
        embedding(ids).sum().backward()
        optimizer.step()
        torch.testing.assert_close(rows_of(embedding, [1]), before - 0.5)
