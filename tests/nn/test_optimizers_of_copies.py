"""Optimizers of copied modules start without states, or load the original's ``state_dict``."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.saved_embeddings import MAKERS, rows, through_file, train
from torchrec_hkv import (
    HKVAdagrad,
    HKVAdamOptimizer,
    HKVOptimizer,
    HKVSparseAdam,
    OptimType,
    TTEmbeddingBag,
)

OPTIMIZERS = [HKVOptimizer, HKVAdamOptimizer, HKVSparseAdam, HKVAdagrad]
COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda module: through_file(module, weights_only=False),
}


def trained(make, optimizer, device):
    module = make(device=device)
    made = optimizer(module, lr=0.1)
    train([module], made, range(3))
    return module, made


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
def test_with_the_old_state_they_go_on(make, optimizer, how, device_type):
    module, old = trained(make, optimizer, device_type)
    copied = how(module)
    new = optimizer(copied, lr=0.1)
    new.load_state_dict(through_file(old.state_dict(), weights_only=True))
    train([module], old, range(3, 6))
    train([copied], new, range(3, 6))
    assert torch.equal(rows(copied), rows(module))


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
def test_without_it_they_start_anew(optimizer, how, device_type):
    """Without it, the optimizer starts anew, as torch.optim.Optimizer does over a copy of any
    module."""
    module, _ = trained(MAKERS["one table"], optimizer, device_type)
    copied, fresh = how(module), MAKERS["one table"](device=device_type)
    fresh.load_state_dict(module.state_dict())
    for each in (copied, fresh):
        train([each], optimizer(each, lr=0.1), range(3, 6))
    assert torch.equal(rows(copied), rows(fresh))
    train([module], optimizer(module, lr=0.1), range(3, 6))
    assert torch.equal(rows(copied), rows(module))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
def test_a_copy_without_an_optimizer_has_the_states(optimizer, how, device_type):
    """A copy without an optimizer keeps the states, and ``apply_gradients`` continues with them."""
    module, old = trained(MAKERS["two tables"], optimizer, device_type)
    copied = how(module)

    class Step:
        @staticmethod
        def step():
            copied.apply_gradients(0.1)

    train([copied], Step, range(3, 6))
    train([module], old, range(3, 6))
    assert torch.equal(rows(copied), rows(module))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_are_not_copied(optimizer, device_type):
    _, made = trained(MAKERS["one table"], optimizer, device_type)
    for how in COPIES.values():
        with pytest.raises(TypeError, match="create one over the copied embeddings, and load this"):
            how(made)


@pytest.fixture
def deterministic():
    """Fixes the order of sums on a GPU: L-BFGS fits rows that leave a cache, and magnifies a
    difference in the last bit."""
    # cuBLAS warns without CUBLAS_WORKSPACE_CONFIG, but its sums have a fixed order on one stream.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", [*COPIES, "state_dict"])
@pytest.mark.usefixtures("deterministic")
def test_tensor_train_bags_with_a_cache_go_on(how, device_type):
    """The fused optimizer is part of the module, so copies include its states."""

    def make():
        return TTEmbeddingBag(
            60, 8, tt_ranks=4, optimizer=OptimType.ADAM, learning_rate=0.05, eps=0.01,
            use_cache=True, cache_size=10, cache_populate_every=2, device=device_type,
        )  # fmt: skip

    def steps(bag, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(4):
            ids = torch.randint(0, 60, (20, 3), generator=generator).to(device_type)
            bag(ids).square().sum().backward()

    module = make()
    steps(module, 0)
    if how == "state_dict":
        other = make()
        other.load_state_dict(through_file(module.state_dict(), weights_only=True))
        other._forwards = module._forwards
    else:
        other = COPIES[how](module)
    steps(module, 1)
    steps(other, 1)
    assert torch.equal(other.full_weight(), module.full_weight())
