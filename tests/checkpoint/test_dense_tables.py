"""Dense-compatible tables: their states are those of stock tables, and load both ways."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim import RowWiseAdagrad

from tests.support.dense_tables import ROWS, dense_batch, dense_model, train_dense
from tests.support.pairwise import pairwise
from torchrec_hkv import HKVOptions, ParameterConstraints, checkpoint

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-6}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6}),
}
TYPES = [
    ("row_wise", "row_wise"),
    ("table_wise", "table_wise"),
    ("column_wise", "column_wise"),
    ("table_row_wise", "row_wise"),
    ("table_column_wise", "table_wise"),
    ("grid_shard", "column_wise"),
]


def _described(state):
    """Names, sizes, shards and dtypes of a state dict of sharded tensors."""
    described = {}
    for key, value in state.items():
        if not isinstance(value, ShardedTensor):
            described[key] = tuple(value.shape)
            continue
        shards = {
            (tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank())
            for s in value.metadata().shards_metadata
        }
        described[key] = (tuple(value.size()), shards, value.dtype)
    return described


def _flat(state):
    return {
        f"{name}/{key}": value
        for name, values in state["state"].items()
        for key, value in values.items()
    }


def _both(world_size, device, types, optimizer):
    return [
        dense_model(world_size, device, kernel, types, *OPTIMIZERS[optimizer])
        for kernel in ("fused", "hkv")
    ]


def _exchange(rank, world_size, device, types, optimizer):
    """Stock to ours, training, ours to stock, training."""
    torch.manual_seed(rank)
    stock, backend = _both(world_size, device, types, optimizer)
    assert _described(backend.state_dict()) == _described(stock.state_dict())
    assert _described(_flat(backend.fused_optimizer.state_dict())) == _described(
        _flat(stock.fused_optimizer.state_dict())
    )
    train_dense(stock, rank, device, range(3))
    steps = iter([range(3, 6), range(6, 9)])
    for to, source in ((backend, stock), (stock, backend)):
        to.load_state_dict(source.state_dict())
        to.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
        trained = next(steps)
        outputs = [train_dense(model, rank, device, trained) for model in (to, source)]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "types", "ranks"), pairwise(OPTIMIZERS, TYPES, [(1, 1), (2, 2), (4, 2)])
)
def test_states_of_stock_tables(run_ranks, optimizer, types, ranks):
    world_size, host_size = ranks
    run_ranks(world_size, _exchange, types, optimizer, host_size=host_size)


def _in_place(rank, world_size, device):
    """As TorchRec's own tests copy states: into the tensors of a state dict."""
    stock, backend = _both(world_size, device, ("row_wise", "row_wise"), "sgd")
    states = stock.state_dict(), backend.state_dict()
    for key, value in states[0].items():
        for source, to in zip(value.local_shards(), states[1][key].local_shards(), strict=True):
            to.tensor.copy_(source.tensor)
    outputs = [train_dense(model, rank, device, range(3)) for model in (stock, backend)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_tensors_of_a_state_dict_may_be_written(run_ranks):
    run_ranks(2, _in_place)


def _from_unsharded(rank, world_size, device):
    torch.manual_seed(3)
    stock, backend = (
        dense_model(
            world_size, device, kernel, ("row_wise", "table_wise"), *OPTIMIZERS["sgd"], device
        )
        for kernel in ("fused", "hkv")
    )
    backend.load_state_dict(stock.state_dict())
    generator = torch.Generator().manual_seed(4)
    full = {
        f"{table}.weight": torch.randn(ROWS, 8, generator=generator)
        for table in ("ebc.embedding_bags.t", "ec.embeddings.q")
    }
    for model in (stock, backend):
        model.load_state_dict({key: value.clone() for key, value in full.items()})
    outputs = [model(dense_batch(rank, 0, device)).detach() for model in (stock, backend)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
    features = dense_batch(rank, 0, device)
    bag = features["f"].values()[: int(features["f"].lengths()[0])]
    expected = full["ebc.embedding_bags.t.weight"][bag.cpu()].sum(0)
    torch.testing.assert_close(outputs[1][:8].cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_weights_that_are_not_sharded(run_ranks):
    run_ranks(2, _from_unsharded)


def _save(rank, world_size, device, kernel, types, optimizer, folder):
    model = dense_model(world_size, device, kernel, types, *optimizer)
    train_dense(model, rank, device, range(4))
    checkpoint.save(folder, model, model.fused_optimizer)
    return train_dense(model, rank, device, range(4, 6))


def _load(rank, world_size, device, kernel, types, optimizer, folder):
    model = dense_model(world_size, device, kernel, types, *optimizer)
    checkpoint.load(folder, model, model.fused_optimizer)
    return train_dense(model, rank, device, range(4, 6))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [("fused", "hkv"), ("hkv", "fused"), ("hkv", "hkv")])
def test_checkpoints_load_into_each_other(run_ranks, kernels, tmp_path):
    types, optimizer = ("row_wise", "row_wise"), OPTIMIZERS["rowwise_adagrad"]
    saved = run_ranks(2, _save, kernels[0], types, optimizer, tmp_path / "checkpoint")
    loaded = run_ranks(2, _load, kernels[1], types, optimizer, tmp_path / "checkpoint")
    for got, expected in zip(loaded, saved, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "host_size"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_states_that_stock_tables_have_not(run_ranks, types, world_size, host_size, tmp_path):
    optimizer = (torch.optim.Adam, {"lr": 0.05})
    folder = tmp_path / "checkpoint"
    saved, loaded = (
        run_ranks(world_size, work, "hkv", types, optimizer, folder, host_size=host_size)
        for work in (_save, _load)
    )
    for got, expected in zip(loaded, saved, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def _resumed(rank, world_size, device, types, optimizer, folder, is_saved):
    """Saves or loads, then trains on the same batches on all ranks, so on the same gradients."""
    model = dense_model(world_size, device, "hkv", types, *optimizer)
    if is_saved:
        train_dense(model, 0, device, range(3))
        checkpoint.save(folder, model, model.fused_optimizer)
    else:
        checkpoint.load(folder, model, model.fused_optimizer)
    return train_dense(model, 0, device, range(3, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "types"),
    [
        (2, ("column_wise", "column_wise")),
        (2, ("table_wise", "column_wise")),
        (1, ("column_wise", "row_wise")),
        (3, ("row_wise", "table_wise")),
    ],
)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torchrec.optim.LAMB])
def test_states_under_another_sharding(run_ranks, optimizer, world_size, types, tmp_path):
    if optimizer is torchrec.optim.LAMB and "column_wise" in types:
        types = ("table_wise", "row_wise")  # norms of rows are those of a shard's columns
    optimizer = (optimizer, {"lr": 0.05})
    folder = tmp_path / "checkpoint"
    saved = run_ranks(2, _resumed, ("row_wise", "row_wise"), optimizer, folder, True)[0]
    for loaded in run_ranks(world_size, _resumed, types, optimizer, folder, False):
        torch.testing.assert_close(loaded, saved, rtol=1e-5, atol=1e-5)


def _write(rank, world_size, device, folder):
    types = ("row_wise", "row_wise")
    model = dense_model(world_size, device, "hkv", types, *OPTIMIZERS["sgd"])
    train_dense(model, rank, device, range(2))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    model.eval()
    return model(dense_batch(0, 9, device)).detach().cpu()


def _read(rank, world_size, device, types, folder):
    model = dense_model(world_size, device, "hkv", types, *OPTIMIZERS["sgd"])
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    model.eval()
    return model(dense_batch(0, 9, device)).detach().cpu()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("types", [("row_wise", "row_wise"), ("column_wise", "table_wise")])
def test_other_world_sizes_and_types(run_ranks, world_size, types, tmp_path):
    saved = run_ranks(2, _write, tmp_path / "checkpoint")
    for loaded in run_ranks(world_size, _read, types, tmp_path / "checkpoint"):
        torch.testing.assert_close(loaded, saved[0], rtol=0, atol=0)


def _out_of_range(rank, world_size, device):
    types = ("row_wise", "row_wise")
    model = dense_model(world_size, device, "hkv", types, *OPTIMIZERS["sgd"])
    messages = []
    for wrong in (ROWS, -1):
        features = dense_batch(0, 0, device)
        features.values()[0] = wrong
        with pytest.raises(ValueError, match="Table 't' has dense=True") as refusal:
            model(features)
        messages.append(str(refusal.value))
    return messages


def test_ids_that_are_no_rows(run_ranks, device_type):
    if device_type == "cuda":
        pytest.skip("an assertion of the device's ends the process")
    for high, low in run_ranks(1, _out_of_range):
        assert f"has id {ROWS}: allowed are row numbers from 0 to {ROWS - 1}." in high
        assert "has id -1:" in low


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expire_after": 3}, "expire_after is 3 and dense is True"),
        ({"initial_capacity": 3}, "initial_capacity is 3 and dense is True"),
        ({"dense": 1}, "dense is 1, but must be True or False"),
    ],
)
def test_options_that_contradict(options, message):
    with pytest.raises(ValueError, match=message):
        ParameterConstraints(
            compute_kernels=["hkv"], options=HKVOptions(**{"dense": True, **options})
        )
