"""The backend ``tt``: options, refusals, announcements and saved state."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import needs_gpu
from tests.support.shards import table_shard
from torchrec_hkv import TTOptions, backends
from torchrec_hkv.backends import BackendOptions, OptimizerSpec, TableShard
from torchrec_hkv.sharding.validation import check_sharding_type
from torchrec_hkv.tensor_train import rows_of

ADAM = OptimizerSpec("adam", 1e-8)
BACKEND = backends.get("tt")


def shard(**changes) -> TableShard:
    values = {"name": "page", "num_embeddings": 2000, "embedding_dim": 16}
    values |= {"capacity": 2000, "dim": 16, "options": TTOptions(ranks=6)}
    return table_shard(**{**values, **changes})


def make(optimizer=None, device="cpu", **changes):
    return BACKEND.create_lookup([shard(**changes)], [0], optimizer, torch.device(device))


def test_options_are_hashable_and_have_defaults():
    assert hash(TTOptions(ranks=[4, 5], p=[9, 9, 9])) == hash(TTOptions(ranks=(4, 5), p=(9, 9, 9)))
    assert TTOptions().shape(1_000_000, 64).ranks == (32, 32)
    assert TTOptions(compression_ratio=100.0).shape(1_000_000, 64).compression_ratio >= 100


@pytest.mark.parametrize(
    ("changes", "optimizer", "match"),
    [
        ({"options": BackendOptions()}, None, "options of type BackendOptions were given"),
        ({"options": TTOptions(p=(9, 9, 9))}, None, "table 'page': p is .* num_embeddings, 2000"),
        ({"options": TTOptions(q=(2, 2, 2))}, None, "table 'page': q is .* embedding_dim, 16"),
        ({"options": TTOptions(ranks=(500, 2))}, None, "table 'page': .*rank 1 can be at most"),
        ({"options": TTOptions(max_bytes=10)}, None, "table 'page': max_bytes is 10"),
        ({"capacity": 1000}, None, "has 1000 of 2000 rows .* takes whole tables"),
        ({"dtype": torch.float16}, None, "data type is torch.float16"),
        ({"init_range": (0.1, -0.1)}, None, "weight_init_min is 0.1"),
        (
            {"init_range": (0.0, 1.0), "options": TTOptions(ranks=(1, 3))},
            None,
            "whose mean is not 0",
        ),
        ({}, OptimizerSpec("lamb"), "optimizer is 'lamb', but backend 'tt' takes 'sgd'"),
        ({}, OptimizerSpec("adam", 0.0), "table 'page': Adam: eps is 0.0"),
        (
            {},
            OptimizerSpec("rowwise_adagrad", max_norm=0.5),
            "table 'page': max_norm is 0.5, but backend 'tt' stores no rows whose norm",
        ),
    ],
)
def test_refused_tables(changes, optimizer, match):
    with pytest.raises(ValueError, match=match):
        BACKEND.check(shard(**changes), optimizer, "cpu")


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_is_what_the_tensors_take(name, dtype):
    spec = None if name is None else OptimizerSpec(name)
    lookup = make(spec, dtype=dtype)
    taken = sum(t.nbytes for t in (*lookup._cores, *lookup._states))
    if spec is not None:
        taken += sum(4 * core.numel() for core in lookup._cores)  # the gradient of an update
    counted = BACKEND.storage(shard(dtype=dtype), spec, "cpu")
    assert counted.hbm == 0
    assert counted.host == pytest.approx(taken, rel=0.01)
    on_gpu = BACKEND.storage(shard(dtype=dtype), spec, "cuda")
    gradient = 0 if spec is not None else sum(4 * core.numel() for core in lookup._cores)
    assert (on_gpu.hbm, on_gpu.host) == (counted.host + gradient, 0)


def test_storage_of_four_cores_has_products_of_two_on_a_gpu():
    four = shard(options=TTOptions(ranks=(2, 3, 2), p=(5, 6, 7, 10), q=(2, 2, 2, 2)))
    sgd = OptimizerSpec("sgd")
    heads = (5 * 6) * (2 * 2) * 3
    on_cpu = BACKEND.storage(four, sgd, "cpu").host
    assert BACKEND.storage(four, sgd, "cuda").hbm == on_cpu + 2 * 4 * heads


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise", "table_row_wise"])
def test_other_sharding_types_are_refused(sharding_type):
    match = rf"Table 'page' can't be sharded '{sharding_type}' on backend 'tt': allowed are"
    with pytest.raises(ValueError, match=match + r" \['data_parallel', 'table_wise'\]"):
        check_sharding_type("page", "tt", [sharding_type])


def test_precision():
    table = shard(options=TTOptions(ranks=6, precision="tf32"))
    BACKEND.check(table, None, "cuda")
    with pytest.raises(ValueError, match="table 'page': precision is 'tf32', but on 'cpu' it must"):
        BACKEND.check(table, None, "cpu")
    with pytest.raises(ValueError, match="precision is 'fp16', but must be 'fp32' or 'tf32'"):
        TTOptions(precision="fp16")
    wide = shard(
        num_embeddings=10**8, capacity=10**8, dim=512, embedding_dim=512,
        options=TTOptions(ranks=(300, 20)),
    )  # fmt: skip
    BACKEND.check(wide, None, "cpu")
    with pytest.raises(ValueError, match=r"ranks are \[300, 20\], but on a GPU"):
        BACKEND.check(wide, None, "cuda")


@needs_gpu
@pytest.mark.parametrize("other", ["tf32", "fp32"])
def test_tables_together_take_the_higher_precision(other):
    shards = [
        shard(name=name, options=TTOptions(ranks=6, precision=precision))
        for name, precision in {"page": "tf32", "user": other}.items()
    ]
    lookup = BACKEND.create_lookup(shards, [0, 1], None, torch.device("cuda"))
    assert lookup._group.precision == other


def test_initial_rows_have_the_configs_mean_and_variance():
    lookup = make(
        init_range=(0.0, 0.6), num_embeddings=10**6, capacity=10**6, options=TTOptions(ranks=24)
    )
    shape = TTOptions(ranks=24).shape(10**6, 16)
    rows = rows_of(shape, lookup.cores("page"), torch.randint(0, 10**6, (20_000,)))
    assert rows.mean() == pytest.approx(0.3, abs=0.02)
    assert rows.std() == pytest.approx(0.6 / 12**0.5, rel=0.1)


def test_cores_follow_from_seed_and_name():
    cores = make().cores("page")
    assert all(map(torch.equal, cores, make().cores("page")))
    assert not torch.equal(cores[0], make(options=TTOptions(ranks=6, seed=1)).cores("page")[0])
    assert not torch.equal(cores[0], make(name="user").cores("user")[0])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_lookup_trains_and_counts(device_type, pooling):
    lookup = make(OptimizerSpec("sgd"), device_type, pooling=pooling)
    shape = lookup._group.shapes[0]
    bags = tt.random_bags([shape], [0], 9).to(device_type)
    rate = torch.tensor(0.1, device=device_type)
    cores = [core.clone().double().requires_grad_() for core in lookup.cores("page")]
    expected = tt.reference_lookup(
        [tt.dense_table(shape, cores)], [0], bags, weights=bags.weights, mean=pooling == "mean"
    )
    out = lookup(bags.ids, bags.offsets, bags.weights, 9, rate)
    assert out.requires_grad
    tt.assert_near(out, expected)
    grad = torch.randn_like(out)
    out.backward(grad)
    gradients = torch.autograd.grad(expected, cores, grad.double())
    for core, old, gradient in zip(lookup.cores("page"), cores, gradients, strict=True):
        tt.assert_near(core, old - 0.1 * gradient)
    lookup.eval()
    lookup(bags.ids, bags.offsets, None, 9, rate)
    n = bags.ids.numel()
    assert lookup.counters("page") == {"lookups": n, "size": 2000, "capacity": 2000}


def test_clip_output_bounds_the_outputs_gradient(device_type):
    clipped = make(OptimizerSpec("sgd", clip_output=0.5), device_type)
    plain = make(OptimizerSpec("sgd"), device_type)
    ids = torch.tensor([3, 9], device=device_type)
    offsets = torch.tensor([0, 2], device=device_type)
    rate = torch.tensor(0.1, device=device_type)
    grad = torch.randn(1, 16, device=device_type) * 2
    clipped(ids, offsets, None, 1, rate).backward(grad)
    plain(ids, offsets, None, 1, rate).backward(grad.clamp(-0.5, 0.5))
    for one, other in zip(clipped.cores("page"), plain.cores("page"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_tables_without_an_optimizer_stay():
    lookup = make()
    before = [core.clone() for core in lookup.cores("page")]
    out = lookup(torch.tensor([3, 9]), torch.tensor([0, 2]), None, 1, torch.tensor(0.1))
    assert out.requires_grad
    out.sum().backward()
    assert all(map(torch.equal, before, lookup.cores("page")))


def test_saved_state_continues_alike():
    def train(lookup, seed):
        torch.manual_seed(seed)
        for _ in range(3):
            bags = tt.random_bags([lookup._group.shapes[0]], [0], 9)
            out = lookup(bags.ids, bags.offsets, None, 9, torch.tensor(0.1))
            out.backward(torch.randn_like(out))

    lookup, other = make(ADAM), make(ADAM, options=TTOptions(ranks=6, seed=7))
    train(lookup, 1)
    state = lookup.export_table("page")
    spec = BACKEND.state_spec(shard(), ADAM)
    assert {k: (tuple(t.shape), t.dtype) for k, t in state.items()} == {
        k: (s.shape, s.dtype) for k, s in spec.items()
    }
    other.load_table("page", state)
    train(lookup, 2)
    train(other, 2)
    assert all(map(torch.equal, lookup.cores("page"), other.cores("page")))


def test_states_of_other_tables_are_refused():
    lookup = make(ADAM)
    before = [core.clone() for core in lookup.cores("page")]
    state = lookup.export_table("page")
    with pytest.raises(ValueError, match="lacks 'tt_core_1'"):
        lookup.load_table("page", {k: t for k, t in state.items() if k != "tt_core_1"})
    other = make(ADAM, options=TTOptions(ranks=5)).export_table("page")
    with pytest.raises(ValueError, match=r"'tt_core_0' has shape .* but the table has"):
        lookup.load_table("page", other)
    # The sizes of the cores are equal, the number of rows is smaller.
    state["tt_shape"][1] -= 1
    with pytest.raises(ValueError, match=r"has the shape \[1, 1999, 3, .* but the table has"):
        lookup.load_table("page", state)
    assert all(map(torch.equal, before, lookup.cores("page")))


def test_gradients_are_not_accumulated():
    assert not backends.get("tt").accumulates
