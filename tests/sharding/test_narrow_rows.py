"""16-bit rows train like those of stock tables, within rounding errors."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType

from tests.support.models import local_tables, make_model, shard_model
from tests.support.pairwise import pairwise
from tests.support.stock_comparison import STEPS, Scenario, train_with_stock
from tests.support.stock_support import skip_unsupported_by_stock
from torchrec_hkv import ParameterConstraints

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pooling", "sharding_type", "optimizer"),
    pairwise(
        ["sum", "mean"], ["row_wise", "table_wise", "column_wise"], ["sgd", "rowwise_adagrad"]
    ),
)
def test_fp16_as_with_stock_tables(run_ranks, run_ranks_once, pooling, sharding_type, optimizer):
    """Stock tables have fp16 rows; FBGEMM's CPU kernels don't train bf16 rows."""
    scenario = Scenario("hkv", sharding_type, pooling, optimizer, rows="fp16", stock_rows="fp16")
    with skip_unsupported_by_stock():
        narrow = run_ranks(2, train_with_stock, scenario)
        scenario = Scenario("hkv", sharding_type, pooling, optimizer)
        exact = run_ranks_once(2, train_with_stock, scenario)
    stock, backend_losses = torch.stack([outcome.losses for outcome in narrow]).unbind(2)
    full_stock, full_ours = torch.stack([outcome.losses for outcome in exact]).unbind(2)
    effect = (stock - full_stock).abs().max()
    assert 0 < effect < 0.05 * full_stock.max()
    assert (backend_losses - full_ours).abs().max() > 0
    # Each step rounds rows to one of two neighbouring values.
    torch.testing.assert_close(backend_losses, stock, rtol=STEPS * 2.0**-11, atol=STEPS * 2.0**-11)
    for outcome in narrow:
        for table in ("t0", "t1"):
            stock_rows, our_rows = outcome.rows[table]
            if pooling == "sum":  # TorchRec divides a row-wise mean by a value near 1
                assert torch.equal(our_rows, our_rows.half().float())
            # For values below 1.
            torch.testing.assert_close(our_rows, stock_rows, rtol=0, atol=STEPS * 2.0**-11)


@pytest.mark.parametrize("rows", ["fp16", "bf16"])
@pytest.mark.parametrize("pooling", ["sum", "weighted"])
def test_near_rows_of_32_bits(run_ranks, pooling, rows):
    """The stock tables are float32 and start from the rounded rows."""
    scenario = Scenario("hkv", "row_wise", pooling, "sgd", rows=rows)
    step = {"fp16": 2.0**-11, "bf16": 2.0**-8}[rows]
    for outcome in run_ranks(2, train_with_stock, scenario):
        stock_losses, our_losses = outcome.losses.unbind(1)
        torch.testing.assert_close(our_losses, stock_losses, rtol=STEPS * step, atol=STEPS * step)
        assert not torch.equal(our_losses, stock_losses)
        for table in ("t0", "t1"):
            full, ours = outcome.rows[table]
            assert torch.equal(ours, ours.to(DTYPES[rows]).float())
            assert not torch.equal(ours, full)
            torch.testing.assert_close(ours, full, rtol=0, atol=STEPS * step)


def _bytes(rank, world_size, device, rows):
    tables = [
        EmbeddingBagConfig(
            name="t",
            num_embeddings=4096,
            embedding_dim=64,
            feature_names=["f"],
            data_type=DataType(rows.upper()),
        )
    ]
    constraints = {"t": ParameterConstraints(compute_kernels=["hkv"])}
    model = shard_model(make_model(tables), constraints, world_size, device)
    ((key, lookup),) = [(key, lookup) for key, lookup in local_tables(model).items()]
    state = model.state_dict()
    (name,) = [name for name in state if name.endswith("t.weight")]
    held = lookup.memory(key)
    return held.hbm + held.host, state[name].local_shards()[0].tensor.dtype


def test_they_take_half_the_bytes(run_ranks):
    ((wide, wide_dtype),) = run_ranks(1, _bytes, "fp32")
    assert wide_dtype == torch.float32
    for rows, dtype in DTYPES.items():
        ((narrow, narrow_dtype),) = run_ranks(1, _bytes, rows)
        assert narrow_dtype == dtype
        assert wide - narrow == 2 * 64 * 4096
