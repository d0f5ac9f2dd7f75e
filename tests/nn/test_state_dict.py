"""``state_dict`` of modules and optimizers: contents and refusals."""

import pytest
import torch

from tests.support.embeddings import make_embedding
from tests.support.saved_embeddings import IDS, MAKERS, lookup, rows, through_file, train
from torchrec_hkv import HKVAdamOptimizer, HKVOptimizer, HKVSparseAdam


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("optimizer", [HKVOptimizer, HKVAdamOptimizer, HKVSparseAdam])
def test_state_dicts_continue_a_training(make, optimizer, device_type):
    first = make(device=device_type)
    first_optimizer = optimizer(first, lr=0.1)
    train([first], first_optimizer, range(5))
    for group in first_optimizer.param_groups:
        group["lr"] = 0.05
    state = through_file(
        {"model": first.state_dict(), "optimizer": first_optimizer.state_dict()}, weights_only=True
    )
    second = make(device=device_type, seed=1)
    second_optimizer = optimizer(second, lr=0.1)
    second.load_state_dict(state["model"])
    second_optimizer.load_state_dict(state["optimizer"])
    assert torch.equal(rows(second), rows(first))
    train([first], first_optimizer, range(5, 10))
    train([second], second_optimizer, range(5, 10))
    assert torch.equal(rows(second), rows(first))
    ids = torch.tensor([77], device=device_type)  # new to both, so the seed was loaded
    assert torch.equal(lookup(second, ids), lookup(first, ids))


def test_state_dict_keeps_who_is_to_leave(device_type):
    def full():
        return make_embedding(device=device_type, max_capacity=64, init_capacity=64)

    first = full()
    first(torch.arange(40, device=device_type))
    first(torch.arange(20, device=device_type))
    second = full()
    second.load_state_dict(first.state_dict())
    second(torch.arange(100, 144, device=device_type))
    ids = first.state_dict()["ids"].tolist()
    assert sorted(ids) == list(range(40))
    left = set(second.state_dict()["ids"].tolist())
    assert left >= set(range(20))
    assert not left & set(range(20, 40))


def test_loading_rows_keeps_optimizer_states_of_ids_that_stay(device_type):
    """As in PyTorch, a module's state_dict has nothing of its optimizer."""
    embedding = make_embedding(device=device_type)
    optimizer = HKVSparseAdam(embedding, lr=0.1)
    train([embedding], optimizer, range(3))
    before = optimizer.state_dict()["state"][0]["0"]
    embedding.load_state_dict(embedding.state_dict())
    after = optimizer.state_dict()["state"][0]["0"]
    assert before["states"].abs().max() > 0
    for actual, expected in ((after, before),):
        order, other = actual["ids"].argsort(), expected["ids"].argsort()
        assert torch.equal(actual["ids"][order], expected["ids"][other])
        assert torch.equal(actual["states"][order], expected["states"][other])
        assert torch.equal(actual["step"], expected["step"])


def test_an_optimizers_state_needs_the_rows_first(device_type):
    first = make_embedding(device=device_type)
    first_optimizer = HKVAdamOptimizer(first)
    train([first], first_optimizer, range(2))
    second_optimizer = HKVAdamOptimizer(make_embedding(device=device_type))
    with pytest.raises(ValueError, match="load the embedding's state_dict before its optimizer's"):
        second_optimizer.load_state_dict(first_optimizer.state_dict())


def test_a_state_of_another_optimizer_is_refused(device_type):
    first = HKVAdamOptimizer(make_embedding(device=device_type), betas=(0.8, 0.9))
    second = HKVAdamOptimizer(make_embedding(device=device_type))
    with pytest.raises(ValueError, match=r"has betas=\(0.8, 0.9\), but this HKVAdamOptimizer has"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="has betas=None"):
        second.load_state_dict(HKVOptimizer(make_embedding(device=device_type)).state_dict())


def broken(change):
    state = make_embedding().state_dict()
    return {**state, **change(state)}


BROKEN = {
    "rows must be torch.float32 of shape": lambda s: {"rows": s["rows"].double()},
    r"rows must be torch.float32 of shape \(2, 4\)": lambda s: {
        "ids": torch.tensor([1, 2]),
        "rows": torch.zeros(2, 3),
    },
    "hold an id more than once": lambda s: {
        "ids": torch.tensor([1, 1]),
        "rows": torch.zeros(2, 4),
        "last_steps": torch.zeros(2, dtype=torch.int32),
    },
    "scores must be torch.int64 of shape": lambda s: {"scores": torch.zeros(4).long()},
    "Unexpected key": lambda s: {"weight": torch.zeros(3)},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_state_dict_is_refused_and_nothing_changes(message, device_type):
    module = make_embedding(device=device_type)
    train([module], HKVOptimizer(module, lr=0.1), range(2))
    before = rows(module)
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(broken(BROKEN[message]))
    if message != "Unexpected key":  # as in PyTorch: other keys are loaded before the error
        assert torch.equal(rows(module), before)


def test_a_missing_key_is_refused(device_type):
    state = make_embedding().state_dict()
    del state["ids"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"ids"'):
        make_embedding(device=device_type).load_state_dict(state)


def test_too_many_rows_are_refused(device_type):
    large = make_embedding(device=device_type)
    large(torch.arange(1000, device=device_type))
    small = make_embedding(device=device_type, max_capacity=64)
    with pytest.raises(RuntimeError, match=r"found no slot .* larger max_capacity"):
        small.load_state_dict(large.state_dict())


def test_a_held_gradient_keeps_tables_as_they_are(device_type):
    module = make_embedding(device=device_type)
    state = module.state_dict()
    lookup(module, torch.tensor(IDS, device=device_type)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\)"):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\)"):
        HKVOptimizer(module)


def test_a_backward_after_loading_is_refused(device_type):
    module = make_embedding(device=device_type)
    loss = lookup(module, torch.tensor(IDS, device=device_type)).sum()
    module.load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match="ran after its table was moved, loaded"):
        loss.backward()
