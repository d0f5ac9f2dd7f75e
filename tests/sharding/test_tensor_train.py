"""Tensor-Train, hash and stock tables train in one collection, over two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.sharding.test_data_parallel import FEATURES, batch_of, lookups_of
from tests.sharding.test_data_parallel import make as make_parallel
from tests.support import tensor_train as tt
from tests.support.models import local_tables, make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, TTOptions, checkpoint

BATCH, STEPS, RATE = 6, 5, 0.2
OPTIONS = TTOptions(ranks=(5, 4), seed=3)
SHAPE = OPTIONS.shape(300, 8)
ROWS = {"t": 300, "h": 400, "s": 50}


def make(world_size, device):
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=8, feature_names=[f"f_{name}"]
        )
        for name, rows in ROWS.items()
    ]
    constraints = {
        "t": ParameterConstraints(compute_kernels=["tt"], options=OPTIONS),
        "h": ParameterConstraints(compute_kernels=["hkv"], options=HKVOptions()),
        "s": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise"]),
    }
    model = make_model(tables, optimizer_kwargs={"lr": RATE})
    return shard_model(model, constraints, world_size, device)


def make_batches(world_size):
    """Batches of every step and rank, equal on all ranks."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda high, size: torch.randint(0, high, size, generator=generator)  # noqa: E731
    batches = []
    for _ in range(STEPS):
        ranks = []
        for _ in range(world_size):
            lengths = draw(4, (3 * BATCH,))
            ids = [
                draw(rows, (int(lengths[f * BATCH : (f + 1) * BATCH].sum()),))
                for f, rows in enumerate(ROWS.values())
            ]
            ranks.append((torch.cat(ids), lengths))
        batches.append(ranks)
    return batches


def _train(rank, world_size, device):
    model = make(world_size, device)
    local = local_tables(model)
    own = [core.cpu() for core in local["t"].cores("t")] if "t" in local else None
    cores = [None] * world_size
    dist.all_gather_object(cores, own)
    reference = next(c for c in cores if c is not None)
    reference = [core.double().requires_grad_() for core in reference]
    worst, losses = 0.0, []
    for ranks in make_batches(world_size):
        ids, lengths = ranks[rank]
        features = KeyedJaggedTensor(
            keys=["f_t", "f_h", "f_s"], values=ids.to(device), lengths=lengths.to(device)
        )
        out = model(features)
        column = 8 * sorted(["f_t", "f_h", "f_s"]).index("f_t")
        total = 0.0
        for other, (other_ids, other_lengths) in enumerate(ranks):
            n = int(other_lengths[:BATCH].sum())
            offsets = torch.cat([torch.zeros(1).long(), other_lengths[:BATCH].cumsum(0)])
            bags = tt.Bags(other_ids[:n], offsets, torch.ones(n), BATCH)
            expected = tt.reference_lookup([tt.dense_table(SHAPE, reference)], [0], bags)
            if other == rank:
                ours = out[:, column : column + 8].detach().cpu().double()
                worst = max(worst, float((ours - expected).abs().max()))
            # TorchRec divides gradients by the number of ranks.
            total = total + (expected - 1).square().sum() / world_size
        loss = (out - 1).square().sum()
        loss.backward()
        losses.append(loss.item())
        gradients = torch.autograd.grad(total, reference)
        reference = [
            (core - RATE * gradient).detach().requires_grad_()
            for core, gradient in zip(reference, gradients, strict=True)
        ]
    return worst, losses, sorted(local), float(tt.dense_table(SHAPE, reference).abs().max())


def test_tt_hkv_and_fused_in_one_collection(run_ranks):
    results = run_ranks(2, _train)
    for worst, losses, _, largest in results:
        assert worst < 1e-4 * max(1.0, largest)
        assert losses[-1] < losses[0]
    assert [names.count("t") for _, _, names, _ in results].count(1) == 1  # on one rank


def _save_and_load(rank, world_size, device, folder=None):
    first, second = make(world_size, device), make(world_size, device)
    for ranks in make_batches(world_size):
        ids, lengths = ranks[rank]
        features = KeyedJaggedTensor(
            keys=["f_t", "f_h", "f_s"], values=ids.to(device), lengths=lengths.to(device)
        )
        first(features).square().sum().backward()
    differed = not torch.equal(first(features), second(features))
    state = first.state_dict()
    keys = [key for key in state if ".t." in key]
    if folder is None:
        second.load_state_dict(state)
    else:
        checkpoint.save(folder, first)
        checkpoint.load(folder, second)
    first.eval(), second.eval()
    return differed, torch.equal(first(features), second(features)), sorted(keys)


def test_state_dict_holds_the_cores(run_ranks):
    for differed, equal, keys in run_ranks(2, _save_and_load):
        assert differed
        assert equal
        assert [key.rsplit(".", 1)[1] for key in keys] == [
            "optimizer_step", "shards", "tt_core_0", "tt_core_1", "tt_core_2", "tt_shape"
        ]  # fmt: skip


def test_checkpoint(run_ranks, tmp_path):
    for differed, equal, _ in run_ranks(2, _save_and_load, str(tmp_path / "saved")):
        assert differed
        assert equal


def _sequences(rank, world_size, device, sharding_type):
    tables = ("t", "u")
    model = make_parallel("sequences", "sgd", sharding_type, world_size, device, tables)
    features = batch_of(0, rank, device, tables, False, [6] * world_size)
    own = {
        name: (lookup._group.shapes[lookup._index[name]], [c.cpu() for c in lookup.cores(name)])
        for name, lookup in lookups_of(model).items()
    }
    everywhere = [None] * world_size
    dist.all_gather_object(everywhere, own)
    dense = {n: tt.dense_table(*of) for held in everywhere for n, of in held.items()}
    rows = {key: jagged.values() for key, jagged in model.module.embeddings(features).items()}
    table_of = {key: name for name in tables for key in FEATURES[name]}
    worst = []
    for key, table in table_of.items():
        expected = dense[table][features[key].values().cpu()]
        worst.append(float((rows[key].cpu().double() - expected).abs().max()))
    return worst, sorted(own)


@pytest.mark.parametrize("sharding_type", ["table_wise", "data_parallel"])
def test_sequences_are_rows_of_the_table(run_ranks, sharding_type):
    results = run_ranks(2, _sequences, sharding_type)
    for worst, held in results:
        assert len(worst) == 3
        assert max(worst) < 1e-5
        assert held == ["t", "u"] or sharding_type == "table_wise"
