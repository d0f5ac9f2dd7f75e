"""Clipping ``.grad`` can't affect rows that the backward trains: it warns once, and names an
alternative."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.optim import SGD
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.support.models import make_model, shard_model
from tests.support.small_models import batch
from torchrec_hkv import ParameterConstraints, TTOptions
from torchrec_hkv.sharding import BackendEmbeddingBagCollectionSharder

pytestmark = pytest.mark.compat


def _make(world_size, device, backend, sharding_type, optimizer_kwargs, fused_params):
    """Tables ``t`` and ``s`` on the backend."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=4, feature_names=[feature])
        for name, feature in (("t", "f"), ("s", "g"))
    ]
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[backend],
            sharding_types=[sharding_type],
            options=TTOptions(ranks=2) if backend == "tt" else None,
        )
        for name in ("t", "s")
    }
    optimizer = SGD if optimizer_kwargs else None
    sharders = [BackendEmbeddingBagCollectionSharder(fused_params)]
    model = make_model(tables, optimizer, optimizer_kwargs)
    return shard_model(model, constraints, world_size, device, sharders)


class _Over(nn.Module):
    """A model with a dense layer above its tables."""

    def __init__(self, model, device):
        super().__init__()
        self.model = model
        self.over = nn.Linear(8, 1, device=device)

    def forward(self, features):
        return self.over(self.model(features)).sum()


def _clips(model):
    """Ways to clip all gradients of a model in each step."""

    def wrapped():
        optimizer = GradientClippingOptimizer(
            model.model.fused_optimizer, GradientClipping.NORM, max_gradient=1.0
        )
        optimizer.step()

    return {
        "norm": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "value": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "torchrec": wrapped,
    }


def _step(rank, world_size, device, backend, sharding_type, way, kwargs, fused_params):
    """The warnings of two steps, by action."""
    sharded = _make(world_size, device, backend, sharding_type, kwargs, fused_params)
    model = _Over(sharded, device)
    dense = torch.optim.Adam(
        [p for _, p in in_backward_optimizer_filter(model.named_parameters())], lr=0.1
    )
    everything = torch.optim.SGD(model.parameters(), lr=0.0)
    given = {"clips": [], "others": []}
    for seed in range(2):
        ids = batch(rank, device, seed)
        if backend == "tt":
            ids.values().remainder_(64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            everything.zero_grad()
            model.zero_grad()
            model(ids).backward()
        given["others"] += caught
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _clips(model)[way]()
        given["clips"] += caught
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dense.step()
            everything.step()
            sharded.fused_optimizer.step()
        given["others"] += caught
    found = {
        when: [(str(w.message), w.filename) for w in caught if "Clipping .grad" in str(w.message)]
        for when, caught in given.items()
    }
    assert all(p.grad is None for p in sharded.parameters())
    assert model.over.weight.grad is not None
    return found


@pytest.mark.parametrize("way", ["norm", "value", "torchrec"])
@pytest.mark.parametrize(
    ("backend", "sharding_type"),
    [(b, t) for b in ("toy", "hkv") for t in ("row_wise", "table_wise")]
    + [("tt", "table_wise"), ("tt", "data_parallel")],
)
def test_each_rank_warns_once_of_all_tables(run_ranks, backend, sharding_type, way):
    seen = set()
    for found in run_ranks(2, _step, backend, sharding_type, way, {"lr": 0.1}, None):
        assert found["others"] == []
        texts = [text for text, _ in found["clips"]]
        named = sorted(name for name in ("t", "s") for text in texts if f"'{name}'" in text)
        # TorchRec's wrapper has only the parameters of this rank's shards.
        assert named == ["s", "t"] if way != "torchrec" else len(named) == len(set(named))
        seen.update(named)
        assert all("gradient_clipping=True with max_gradient" in text for text in texts)
        # The warning shows the line that clips, not one of PyTorch's.
        assert all(file == __file__ for _, file in found["clips"])
    assert seen == {"s", "t"}


@pytest.mark.parametrize(
    ("kwargs", "fused_params"),
    [
        ({"lr": 0.1, "gradient_clipping": True, "max_gradient": 1.0}, None),
        ({"lr": 0.1, "clip_norm": 1.0}, None),
        ({"lr": 0.1, "clip_value": 1.0}, None),
        (None, {"gradient_clipping": True}),
    ],
)
def test_tables_that_clip_themselves_cause_none(run_ranks, kwargs, fused_params):
    for found in run_ranks(2, _step, "hkv", "table_wise", "norm", kwargs, fused_params):
        assert found == {"clips": [], "others": []}
