"""16-bit and int8 rows are saved unchanged, and load bit for bit at any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_models import evaluate, joined, make_tables, model_contents, train
from torchrec_hkv import checkpoint

#: Dtype in a ``state_dict``, where int8 rows are float32 multiples of their scales.
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}
#: int8 rows can't be sharded by columns, which share a scale.
CASES = [
    (dtype, *plan)
    for dtype in DTYPES
    for plan in [(1, "row_wise"), (2, "table_wise" if dtype == "int8" else "column_wise")]
]


def _saved(rank, world_size, device, dtype, folder, plain):
    model = make_tables(world_size, device, "row_wise", hash_dtype=dtype)
    train(model, rank, device, range(6))
    if plain:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    else:
        checkpoint.save(folder, model, model.fused_optimizer)
    rows = {
        value.dtype
        for name, value in model.state_dict().items()
        if name.endswith(("lru.weight", "lfu.weight", "lru.scales", "lfu.scales"))
    }
    assert rows == {DTYPES[dtype]}
    return model_contents(model, "adam"), checkpoint.digest(model), evaluate(model, device)


def _loaded(rank, world_size, device, dtype, sharding_type, folder, plain):
    model = make_tables(world_size, device, sharding_type, hash_dtype=dtype)
    if plain:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    else:
        assert checkpoint.load(folder, model, model.fused_optimizer) == 0
    result = model_contents(model, "adam"), checkpoint.digest(model), evaluate(model, device)
    train(model, rank, device, range(2))
    return result


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("dtype", "ranks", "sharding_type"), CASES)
def test_at_other_ranks(run_ranks, tmp_path, plain, dtype, ranks, sharding_type):
    folder = tmp_path / "checkpoint"
    saved = run_ranks(2, _saved, dtype, folder, plain)
    loaded = run_ranks(ranks, _loaded, dtype, sharding_type, folder, plain)
    before, after = (joined([values for values, *_ in results]) for results in (saved, loaded))
    assert len(before) > 1000
    assert after == before
    hashed = [
        {name: value for name, value in digest.items() if name.endswith(("lru", "lfu"))}
        for _, digest, _ in [*saved, *loaded]
    ]
    assert hashed[0]
    assert all(digest == hashed[0] for digest in hashed)
    outputs = [output for *_, output in [*saved, *loaded]]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-6, atol=1e-6)


def _refused(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", hash_dtype="fp16")
    before = model_contents(model, "adam")
    try:
        checkpoint.load(folder, model, model.fused_optimizer)
    except ValueError as error:
        assert model_contents(model, "adam") == before
        return str(error)
    return "nothing"


def test_another_dtype_is_refused(run_ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    run_ranks(1, _saved, "bf16", folder, False)
    (message,) = run_ranks(1, _refused, folder)
    assert "dtype" in message
    assert "bfloat16" in message
    assert "float16" in message.replace("bfloat16", "")
