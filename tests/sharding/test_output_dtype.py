"""16-bit outputs, as requested by ``output_dtype``, train like those of stock tables."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from tests.support.models import make_model, shard_model
from tests.support.stock_comparison import STEPS, Scenario, train_with_stock
from tests.support.stock_support import skip_unsupported_by_stock
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.sharding import BackendEmbeddingBagCollectionSharder


def _close_to_stock(run_ranks, run_ranks_once, scenario, exact):
    """Differs from stock tables by rounding only; both differ from 32-bit outputs."""
    with skip_unsupported_by_stock():
        narrow = run_ranks(2, train_with_stock, scenario)
        wide = run_ranks_once(2, train_with_stock, exact)
    stock, backend_losses = torch.stack([outcome.losses for outcome in narrow]).unbind(2)
    full_stock, full_ours = torch.stack([outcome.losses for outcome in wide]).unbind(2)
    effect = (stock - full_stock).abs().max()
    assert 0 < effect < 0.05 * full_stock.max()
    assert (backend_losses - full_ours).abs().max() > 0
    # Each step rounds outputs to one of two neighbouring values.
    bound = STEPS * {"fp16": 2.0**-11, "bf16": 2.0**-8}[scenario.output]
    torch.testing.assert_close(backend_losses, stock, rtol=bound, atol=bound)


def _skip_where_stock_lacks(device_type, output):
    if device_type == "cpu" and output == "bf16":
        pytest.skip("FBGEMM's CPU kernels have no bfloat16 outputs")


@pytest.mark.parametrize("output", ["fp16", "bf16"])
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize("pooling", ["mean", "weighted"])
def test_as_with_stock_tables(
    run_ranks, run_ranks_once, device_type, pooling, sharding_type, output
):
    _skip_where_stock_lacks(device_type, output)
    scenario = Scenario("hkv", sharding_type, pooling, "sgd", output=output)
    exact = Scenario("hkv", sharding_type, pooling, "sgd")
    _close_to_stock(run_ranks, run_ranks_once, scenario, exact)


@pytest.mark.parametrize("output", ["fp16", "bf16"])
def test_batch_sizes_of_features(run_ranks, run_ranks_once, device_type, output):
    _skip_where_stock_lacks(device_type, output)
    scenario = Scenario("hkv", "table_wise", "sum", "sgd", batches="variable")
    told = Scenario("hkv", "table_wise", "sum", "sgd", batches="variable", output=output)
    _close_to_stock(run_ranks, run_ranks_once, told, scenario)


def _one_table(rank, world_size, device, constraint, fused_params):
    """One table; if it is table-wise, one of two ranks has none."""
    tables = [EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=8, feature_names=["f"])]
    sharder = BackendEmbeddingBagCollectionSharder(fused_params)
    given = ParameterConstraints(
        compute_kernels=["hkv"], sharding_types=["table_wise"], output_dtype=constraint
    )
    model = shard_model(make_model(tables), {"t": given}, world_size, device, [sharder])
    # Outputs are small integers, exact in 16 bits: the ids, in both columns of every bag.
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.arange(6) + 6 * rank, torch.tensor([1, 0, 2, 3])
    )
    out = model(features.to(device))
    (out.float() * 2).sum().backward()
    return out.detach().cpu(), model(features.to(device)).detach().cpu()


@pytest.mark.parametrize(
    ("constraint", "fused_params", "dtype"),
    [
        (DataType.FP16, {}, torch.float16),
        (DataType.BF16, {}, torch.bfloat16),
        (None, {"output_dtype": SparseType.FP16}, torch.float16),
        # A table's own setting takes precedence.
        (DataType.FP32, {"output_dtype": SparseType.FP16}, torch.float32),
        (None, {}, torch.float32),
    ],
    ids=str,
)
def test_a_rank_without_tables(run_ranks, constraint, fused_params, dtype):
    got = run_ranks(2, _one_table, constraint, fused_params)
    wanted = run_ranks(2, _one_table, None, {})
    for (first, second), (exact_first, exact_second) in zip(got, wanted, strict=True):
        assert first.dtype == second.dtype == dtype
        assert torch.equal(first, exact_first.to(dtype))
        torch.testing.assert_close(second.float(), exact_second, rtol=1e-2, atol=1e-3)
        assert (second - first).abs().max() > 0.1


def _refused(rank, world_size, device, kernels, told, fused_params):
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=64, embedding_dim=8, feature_names=[f"f{name}"]
        )
        for name in ("a", "b")
    ]
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernels[name]], sharding_types=["table_wise"], output_dtype=told[name]
        )
        for name in ("a", "b")
    }
    sharder = BackendEmbeddingBagCollectionSharder(fused_params)
    try:
        shard_model(make_model(tables), constraints, world_size, device, [sharder])
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kernels", "told", "fused_params", "message"),
    [
        (
            ("hkv", "hkv"),
            (DataType.INT8, None),
            {},
            "output_dtype=INT8, but backend 'hkv'",
        ),
        (
            ("hkv", "hkv"),
            (None, None),
            {"output_dtype": SparseType.INT8},
            "but backend 'hkv' supports only torch.float32, torch.float16, torch.bfloat16.",
        ),
        (
            ("tt", "tt"),
            (None, None),
            {"output_dtype": SparseType.FP16},
            "backend 'tt' supports only torch",
        ),
        (("hkv", "hkv"), (None, DataType.FP16), {}, "'b' of torch.float16, but tables of one"),
        (("hkv", "fused"), (DataType.BF16, None), {}, "'b' of torch.float32, but tables of one"),
    ],
)
def test_what_is_refused(run_ranks, kernels, told, fused_params, message):
    (said,) = run_ranks(
        1,
        _refused,
        dict(zip("ab", kernels, strict=True)),
        dict(zip("ab", told, strict=True)),
        fused_params,
    )
    assert message in said
