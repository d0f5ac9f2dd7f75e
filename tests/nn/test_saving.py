"""state_dict, torch.save, deepcopy, and moving between devices."""

import copy
import io

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables
from torchrec_hkv import HKVAdamOptimizer, HKVOptimizer, HKVSparseAdam

IDS = [-(2**63), -1, 0, 1, 2, 3, 2**63 - 1]


def train(modules, optimizer, seeds):
    """Steps that all see the same ids and gradients."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.tensor(IDS)[torch.randint(len(IDS), (5,), generator=generator)]
        grads = torch.randn(5, 4, generator=generator)
        for module in modules:
            rows = lookup(module, ids.to(module.device))
            (rows * grads.to(module.device)).sum().backward()
        optimizer.step()


def lookup(module, ids):
    return module([ids, ids + 1])[1] if hasattr(module, "num_tables") else module(ids)


def rows(module):
    with torch.no_grad():
        return lookup(module, torch.tensor(IDS, device=module.device)).cpu()


def through_file(content, **kwargs):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, **kwargs)


MAKERS = {
    "one table": make_embedding,
    "two tables": lambda **changes: make_tables(2, **changes),
    "lfu": lambda **changes: make_embedding(eviction="lfu", **changes),
}


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
    ids = torch.tensor([77], device=device_type)  # new to both: the seed was loaded, too
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
    """As PyTorch's: a module's state_dict has nothing of its optimizer."""
    embedding = make_embedding(device=device_type)
    optimizer = HKVSparseAdam(embedding, lr=0.1)
    train([embedding], optimizer, range(3))
    before = optimizer.state_dict()["state"][0]["0"]
    embedding.load_state_dict(embedding.state_dict())
    after = optimizer.state_dict()["state"][0]["0"]
    assert before["states"].abs().max() > 0
    for ours, theirs in ((after, before),):
        order, other = ours["ids"].argsort(), theirs["ids"].argsort()
        assert torch.equal(ours["ids"][order], theirs["ids"][other])
        assert torch.equal(ours["states"][order], theirs["states"][other])
        assert torch.equal(ours["step"], theirs["step"])


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


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_copies_are_equal_and_apart(make, how, device_type):
    module = torch.nn.Sequential(make(device=device_type))
    optimizer = HKVAdamOptimizer(module[0], lr=0.1)
    train([module[0]], optimizer, range(3))
    if how == "deepcopy":
        copied = copy.deepcopy(module)[0]
    else:
        copied = through_file(module, weights_only=False)[0]
    trained = rows(module[0])
    assert torch.equal(rows(copied), trained)
    train([copied], HKVOptimizer(copied, lr=0.1), range(3, 5))
    assert not torch.equal(rows(copied), trained)
    assert torch.equal(rows(module[0]), trained)
    train([module[0]], optimizer, range(3, 4))


def test_a_copy_keeps_mode_and_freezing(device_type):
    module = make_embedding(device=device_type, padding_idx=3).eval().requires_grad_(False)
    copied = copy.deepcopy(module)
    assert (copied.training, copied.anchor.requires_grad, copied.padding_idx) == (False, False, 3)


def test_a_copied_anchor_stands_for_the_copy(device_type):
    module = make_embedding(device=device_type)
    copied = copy.deepcopy(module)
    optimizer = HKVOptimizer(copied, lr=0.5)
    before = rows(copied)
    lookup(copied, torch.tensor(IDS, device=device_type)).sum().backward()
    copied.anchor.grad.mul_(2)
    optimizer.step()
    torch.testing.assert_close(rows(copied), before - 1)


def test_optimizers_are_not_copied(device_type):
    optimizer = HKVOptimizer(make_embedding(device=device_type))
    with pytest.raises(TypeError, match="make one over the copied embedding"):
        copy.deepcopy(optimizer)


@pytest.mark.gpu
def test_a_module_moves_to_a_gpu_and_back():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    module = torch.nn.Sequential(make_embedding())
    optimizer = HKVAdamOptimizer(module[0], lr=0.1)
    train([module[0]], optimizer, range(3))
    twin = copy.deepcopy(module)
    expected = rows(twin[0])
    module.to("cuda")
    assert module[0].device.type == "cuda"
    assert torch.equal(rows(module[0]), expected)
    train([module[0]], optimizer, range(3, 5))
    module.cpu()
    assert module[0].device.type == "cpu"
    train([module[0]], optimizer, range(5, 7))


@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
def test_other_dtypes_are_refused(change, device_type):
    module = torch.nn.Sequential(make_embedding(device=device_type))
    with pytest.raises(TypeError, match="has rows of float32"):
        getattr(module, change)()


def test_shared_memory_and_meta_are_refused():
    with pytest.raises(ValueError, match="can't be on device"):
        make_embedding().share_memory()
    with pytest.raises(ValueError, match="can't be on device meta"):
        make_embedding().to("meta")


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
    if message != "Unexpected key":  # as PyTorch: the others are loaded, then it is said
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
    with pytest.raises(RuntimeError, match=r"find no place .* larger max_capacity"):
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
    with pytest.raises(RuntimeError, match="came after its table was moved, loaded"):
        loss.backward()
