"""A lookup in evaluation mode or without autograd changes nothing in a table."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad

from tests.support.backends import BACKENDS
from tests.support.models import make_model, shard_model
from tests.support.small_models import batch, outputs_and_train
from torchrec_hkv import ParameterConstraints

#: Whether the model is in training mode, and whether autograd is on.
MODES = {
    "eval() and no_grad": (False, torch.no_grad),
    "eval()": (False, torch.enable_grad),
    "no_grad": (True, torch.no_grad),
    "inference_mode": (True, torch.inference_mode),
}


def _make(world_size, device, backend):
    """A model without stock tables, whose CPU kernels can't run in ``inference_mode``."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=256, embedding_dim=4, feature_names=[feature])
        for name, feature in (("t", "f"), ("s", "g"))
    ]
    constraint = ParameterConstraints(compute_kernels=[backend], sharding_types=["row_wise"])
    model = make_model(tables, RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6})
    return shard_model(model, dict.fromkeys(("t", "s"), constraint), world_size, device)


def _held(lookup):
    """The content of this rank's table, including scores, and its counters except lookups."""
    counters = {k: v for k, v in lookup.counters("t").items() if k != "lookups"}
    return counters, {name: t.clone() for name, t in lookup.export_table("t").items()}


def _evaluate(rank, world_size, device, backend, mode):
    is_training, autograd = MODES[mode]
    model = _make(world_size, device, backend)
    outputs_and_train(model, rank, device, steps=1)
    lookup = model.module.ebc.group_lookups()["t"]
    before = _held(lookup)
    model.train(is_training)
    with autograd():
        first = model(batch(rank, device, seed=1))
        second = model(batch(rank, device, seed=1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    if autograd is not torch.enable_grad:
        assert not first.requires_grad
    after = _held(lookup)
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    model.train()
    outputs_and_train(model, rank, device, steps=4, seed=1)
    return after[0]["size"], lookup.counters("t")["size"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_changes_nothing(run_ranks, backend, mode):
    results = run_ranks(2, _evaluate, backend, mode)
    evaluated, trained = (sum(sizes) for sizes in zip(*results, strict=True))
    assert trained > evaluated
