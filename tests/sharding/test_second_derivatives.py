"""``create_graph=True`` through sharded tables."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints

BATCH, DIM = 4, 4
KINDS = [("hkv", "row_wise"), ("hkv", "table_wise")]
KINDS += [("tt", "table_wise"), ("tt", "data_parallel")]


def make(world_size, device, backend, sharding_type, is_weighted=False):
    table = EmbeddingBagConfig(name="t", num_embeddings=200, embedding_dim=DIM, feature_names=["f"])
    constraint = ParameterConstraints(compute_kernels=[backend], sharding_types=[sharding_type])
    model = make_model([table], is_weighted=is_weighted)
    return shard_model(model, {"t": constraint}, world_size, device)


def features(rank, device, weights=None):
    ids = torch.arange(2 * BATCH, device=device) + 5 * rank
    lengths = torch.full((BATCH,), 2, device=device)
    return KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths, weights=weights)


def _weights_error(rank, world_size, device, backend, sharding_type):
    model = make(world_size, device, backend, sharding_type, is_weighted=True)
    weights = torch.rand(2 * BATCH, device=device, requires_grad=True)
    out = model(features(rank, device, weights))
    (first,) = torch.autograd.grad(out.square().sum(), weights, create_graph=True)
    try:
        first.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


# TorchRec's row-wise exchange of ids does not propagate gradients of weights.
@pytest.mark.parametrize(("backend", "sharding_type"), KINDS[1:])
def test_gradients_of_weights_are_refused(run_ranks, backend, sharding_type):
    (sentence,) = run_ranks(1, _weights_error, backend, sharding_type)
    assert "can't be differentiated" in sentence


def test_gradients_of_weights_of_replicas_are_refused(run_ranks):
    for sentence in run_ranks(2, _weights_error, "tt", "data_parallel"):
        assert "can't be differentiated" in sentence


def _loss(rows):
    """A loss with a penalty on the gradient of the layers after the tables."""
    weight = torch.linspace(-1, 1, DIM, device=rows.device, requires_grad=True)
    plain = (rows @ weight).square().sum()
    (first,) = torch.autograd.grad(plain, weight, create_graph=True)
    return plain + first.square().sum()


def _penalized(rank, world_size, device, backend, sharding_type):
    """Rows after a step with a penalty, and after a step with that loss's exact gradient."""
    model, twin = (make(world_size, device, backend, sharding_type) for _ in range(2))
    batch = features(rank, device)
    _loss(model(batch)).backward()
    out = twin(batch)
    leaf = out.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(_loss(leaf), leaf)
    out.backward(wanted)
    with torch.no_grad():
        return [each.eval()(batch).cpu() for each in (model, twin)], leaf.detach().cpu()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("backend", "sharding_type"), KINDS)
def test_penalties_on_other_gradients_train_tables(run_ranks, world_size, backend, sharding_type):
    for (penalized, wanted), before in run_ranks(world_size, _penalized, backend, sharding_type):
        torch.testing.assert_close(penalized, wanted)
        assert not torch.allclose(penalized, before)


def _exchange_error(rank, world_size, device):
    """The error of a second derivative through the exchange of pooled rows; empty if none."""
    from torchrec_hkv.sharding.dists.output_dist import RowWiseOutputDist

    rows = torch.rand(2 * BATCH, DIM, device=device, requires_grad=True)
    exchange = RowWiseOutputDist(torch.distributed.group.WORLD, [DIM])
    out = exchange(rows).wait()
    (first,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    try:
        first.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_through_an_exchange_are_refused(run_ranks):
    for sentence in run_ranks(2, _exchange_error):
        assert "the exchange between ranks" in sentence
