"""Modules evict by every policy of HashTable, and keep the policies' data."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from torchrec_hkv import (
    AgedLFU,
    HierarchicalHashEmbedding,
    HKVAdagrad,
    MultiTableHKVEmbedding,
)

ROWS = 64  # one bucket
POLICIES = ("lru", "lfu", AgedLFU(100.0), "adaptive", "epoch_lru", "epoch_lfu", "customized")


def make(device: str, eviction, **options) -> HierarchicalHashEmbedding:
    """A small embedding."""
    return HierarchicalHashEmbedding(4, ROWS, eviction=eviction, device=device, seed=3, **options)


def look_up(module, ids: list[int], scores: list[int] | None = None) -> torch.Tensor:
    """A training step."""
    given = torch.tensor(ids, device=module.device)
    told = () if scores is None else (torch.tensor(scores, device=module.device),)
    rows = module(given, *told)
    rows.sum().backward()
    module.apply_gradients(0.1)
    return rows


def held(module) -> dict[int, tuple]:
    """Row and score by id."""
    state = module.state_dict()
    scores = state["scores"] if len(state["scores"]) else state["last_steps"]
    rows = state["rows"].tolist()
    return {i: (r, s) for i, r, s in zip(state["ids"].tolist(), rows, scores.tolist(), strict=True)}


def copies_of(module):
    """Copies of the module made in each way, and last the module itself, with an optimizer."""
    device, eviction = module.device, module._tables.plan.eviction
    loaded = make(device, eviction)
    loaded.load_state_dict(module.state_dict())
    yield loaded
    yield copy.deepcopy(module)
    yield pickle.loads(pickle.dumps(module))
    HKVAdagrad(module, lr=0.1)
    yield module


def scores_of(eviction, ids: list[int]) -> list[int] | None:
    """Scores for a policy that takes them."""
    return [-i for i in ids] if eviction == "customized" else None


def _filled(device, eviction):
    """64 ids in two epochs; those of the second have fewer lookups."""
    module = make(device, eviction)
    for first, times in ((0, 3), (32, 1)):
        if "epoch" in str(eviction):
            module.epoch += 1
        ids = list(range(first, first + 32))
        for _ in range(times):
            look_up(module, ids, scores_of(eviction, ids))
    return module


def _leaves(eviction, i: int) -> bool:
    """Whether the id is among the first that may leave."""
    if eviction == "adaptive":  # behaves like LRU or LFU
        return True
    early = eviction in ("lru", "epoch_lru", "epoch_lfu")
    return i == 63 if eviction == "customized" else (i < 32) == early


@pytest.mark.parametrize("eviction", POLICIES, ids=str)
def test_who_leaves(device_type, eviction):
    module = _filled(device_type, eviction)
    assert set(held(module)) == set(range(64))
    look_up(module, [1000], scores_of(eviction, [1000]))
    (removed,) = set(range(64)) - set(held(module))
    assert _leaves(eviction, removed)
    assert 1000 in held(module)


@pytest.fixture
def in_order():
    """New ids get slots in the order of the batch, on a GPU too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("eviction", POLICIES, ids=str)
def test_copies_go_on(device_type, eviction):
    first = _filled(device_type, eviction)
    expected = copy.deepcopy(first)
    before = held(first)
    look_up(expected, [1000, 1001], scores_of(eviction, [1000, 1001]))
    for other in copies_of(first):
        assert held(other) == before
        assert other.group.clock == first.group.clock
        if "epoch" in str(eviction):
            assert other.epoch == 2
        assert other.group.measured_aging(0) == first.group.measured_aging(0)
        look_up(other, [1000, 1001], scores_of(eviction, [1000, 1001]))
        assert held(other).keys() == held(expected).keys()


def test_scores_of_several_tables(device_type):
    module = MultiTableHKVEmbedding(2, 4, ROWS, eviction="customized", device=device_type)
    ids = [torch.tensor([[1, 2]], device=device_type), torch.tensor([2], device=device_type)]
    scores = [torch.tensor([[5, -6]], device=device_type), torch.tensor([7], device=device_type)]
    sum(rows.sum() for rows in module(ids, scores)).backward()
    state = module.state_dict()
    found = [
        dict(
            zip(
                state[f"tables.{t}.ids"].tolist(), state[f"tables.{t}.scores"].tolist(), strict=True
            )
        )
        for t in (0, 1)
    ]
    assert found == [{1: 5, 2: -6}, {2: 7}]
    with pytest.raises(ValueError, match="scores have 1 tensors, but there are 2 tables"):
        module(ids, scores[:1])


def test_evaluations_need_no_scores(device_type):
    module = make(device_type, "customized")
    rows = look_up(module, [3], [4])
    module.eval()
    ids = torch.tensor([3, 5], device=device_type)
    assert not torch.equal(module(ids)[0], rows[0])
    assert torch.equal(module(ids), module(ids, ids))
    assert held(module).keys() == {3}


@pytest.mark.parametrize(
    ("eviction", "scores", "error", "match"),
    [
        ("customized", None, ValueError, "scores must be given in training under eviction"),
        ("lfu", torch.tensor([1, 2]), ValueError, "not be given under eviction 'lfu'"),
        ("customized", torch.tensor([1.0, 2.0]), TypeError, "int64, but are torch.float32"),
        ("customized", [1, 2], TypeError, "int64, but are list"),
        ("customized", torch.tensor([[1, 2]]), ValueError, r"shape \(2,\) of the ids"),
    ],
)
def test_bad_scores(device_type, eviction, scores, error, match):
    module = make(device_type, eviction)
    given = scores.to(device_type) if isinstance(scores, torch.Tensor) else scores
    with pytest.raises(error, match=match):
        module(torch.tensor([1, 2], device=device_type), given)
    assert not held(module)
    assert module.group.clock == 0


def test_bad_epochs(device_type):
    module = make(device_type, "epoch_lru")
    for epoch in (-1, 2**32, 0.5):
        with pytest.raises(ValueError, match=r"epoch is .*, but must be an integer from 0"):
            module.epoch = epoch
    with pytest.raises(ValueError, match="eviction 'lru' has no epochs"):
        make(device_type, "lru").epoch = 1
    state = module.state_dict()
    del state["epoch"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"epoch"'):
        module.load_state_dict(state)
