"""Hot rows of the backend ``tt``: outputs, training, memory and saved state."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.shards import table_shard
from torchrec_hkv import TTOptions, backends
from torchrec_hkv.backends import OptimizerSpec

BACKEND = backends.get("tt")
ROWS, DIM, RATE, BAGS = 300, 8, 0.1, 7
CACHED = {"ranks": 4, "cache_size": 20}
SPECS = {
    "sgd": OptimizerSpec("sgd"),
    "adagrad": OptimizerSpec("adagrad", 0.1),
    "adam": OptimizerSpec("adam", 0.1),
}


def shard(name="page", rows=ROWS, pooling="sum", **options):
    options = TTOptions(**{**CACHED, **options})
    return table_shard(rows, DIM, options, name=name, pooling=pooling, init_range=(-1.0, 1.0))


def make(device="cpu", optimizer="sgd", shards=None, features=(0,)):
    spec = None if optimizer is None else SPECS[optimizer]
    return BACKEND.create_lookup(shards or [shard()], list(features), spec, torch.device(device))


def skewed_bags(device, rows=(ROWS,), batch_size=BAGS):
    """Feature-major bags in which small ids are more frequent."""
    lengths = torch.randint(0, 9, (len(rows), batch_size))
    ids = [(torch.rand(int(lengths[f].sum())) ** 3 * n).long() for f, n in enumerate(rows)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.flatten().cumsum(0)])
    all_ids = torch.cat(ids)
    return tt.Bags(all_ids, offsets, torch.rand(all_ids.numel()), batch_size).to(device)


def full_table(lookup, name="page"):
    """The dense table in float64, with the cached rows written into it."""
    shape = lookup._group.shapes[lookup._index[name]]
    table = tt.dense_table(shape, lookup.cores(name)).detach()
    hot = lookup.hot_rows(name)
    used = hot.ids < shape.num_embeddings
    return table.index_put((hot.ids[used],), hot.rows[used].double())


def call(lookup, bags, weights=None, rate=RATE):
    rate = torch.tensor(rate, device=bags.ids.device)
    return lookup(bags.ids, bags.offsets, weights, bags.batch_size, rate)


def warmed(*arguments, **keywords):
    """A lookup whose cache is full."""
    lookup = make(*arguments, **keywords)
    device = lookup._cores[0].device
    for _ in range(3):
        call(lookup, skewed_bags(device))
    assert lookup.populate_caches() == 1
    assert lookup.hot_rows("page").num_rows == 20
    return lookup


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup_is_that_of_the_whole_table(device_type, pooling, weighted):
    lookup = warmed(device_type, shards=[shard(pooling=pooling)])
    lookup.hot_rows("page").rows += torch.randn(20, DIM, device=device_type)
    bags = skewed_bags(device_type)
    weights = bags.weights if weighted else None
    expected = tt.reference_lookup(
        [full_table(lookup)], [0], bags, weights=weights, mean=pooling == "mean"
    )
    tt.assert_near(call(lookup, bags, weights), expected)
    lookup.eval()
    tt.assert_near(call(lookup, bags, weights), expected)


def test_tables_with_and_without_a_cache_in_one_group(device_type):
    # The first table has two features, around one feature of a table without a cache.
    shards = [shard(), shard("user", 90, cache_size=0), shard("item", 200, cache_size=9)]
    features, rows = (0, 1, 2, 0), (ROWS, 90, 200, ROWS)
    lookup = make(device_type, shards=shards, features=features)
    for _ in range(3):
        call(lookup, skewed_bags(device_type, rows))
    assert lookup.populate_caches() == 2
    bags = skewed_bags(device_type, rows)
    before = {name: full_table(lookup, name).requires_grad_() for name in ("page", "item")}
    user = [core.double().requires_grad_() for core in lookup.cores("user")]
    tables = [before["page"], tt.dense_table(lookup._group.shapes[1], user), before["item"]]
    expected = tt.reference_lookup(tables, features, bags)
    out = call(lookup, bags)
    tt.assert_near(out, expected)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    # One update trained cached rows on the gradients of both features.
    for name, table in before.items():
        hot = lookup.hot_rows(name)
        tt.assert_near(hot.rows, (table - RATE * table.grad)[hot.ids])
    for core, old in zip(lookup.cores("user"), user, strict=True):
        tt.assert_near(core, old - RATE * old.grad)


@pytest.mark.parametrize("autograd", [torch.no_grad, torch.inference_mode])
def test_without_autograd_nothing_is_counted(device_type, autograd):
    """Lookups without autograd do not count ids. The cache repopulates every second training
    lookup."""
    lookup = make(device_type, shards=[shard(cache_populate_every=2)])
    bags = skewed_bags(device_type)
    call(lookup, bags)
    before, counters = lookup.export_table("page"), lookup.counters("page")
    with autograd():
        for _ in range(4):
            out = call(lookup, bags)
    tt.assert_near(out, tt.reference_lookup([full_table(lookup)], [0], bags))
    assert lookup.counters("page") == counters
    after = lookup.export_table("page")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_cores_learn_from_the_other_ids_only(device_type):
    lookup = warmed(device_type)
    shape, hot = lookup._group.shapes[0], lookup.hot_rows("page")
    bags = skewed_bags(device_type)
    cores = [core.double().requires_grad_() for core in lookup.cores("page")]
    cold = (~torch.isin(bags.ids, hot.ids)).float()
    expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags, weights=cold)
    out = call(lookup, bags)
    grad = torch.randn_like(out)
    out.backward(grad)
    gradients = torch.autograd.grad(expected, cores, grad.double())
    for core, old, gradient in zip(lookup.cores("page"), cores, gradients, strict=True):
        tt.assert_near(core, old - RATE * gradient)


def test_training_lookups_and_hits_are_counted(device_type):
    lookup = make(device_type)
    ids = 0
    for _ in range(3):
        bags = skewed_bags(device_type)
        call(lookup, bags)
        ids += bags.ids.numel()
    expected = {"lookups": ids, "size": ROWS, "capacity": ROWS, "hits": 0}
    assert lookup.counters("page") == expected
    lookup.populate_caches()
    bags = skewed_bags(device_type)
    call(lookup, bags)
    hits = int(torch.isin(bags.ids, lookup.hot_rows("page").ids).sum())
    assert hits > 0
    assert lookup.counters("page") == {**expected, "lookups": ids + bags.ids.numel(), "hits": hits}
    lookup.eval()
    call(lookup, bags)
    assert lookup.counters("page")["hits"] == hits


def test_schedule():
    lookup = make(shards=[shard(cache_populate_every=3)])
    bags = skewed_bags("cpu")
    for step in range(8):
        call(lookup, bags)
        assert lookup.hot_rows("page").generation == step // 3
    lookup.eval()
    for _ in range(9):
        call(lookup, bags)
    assert lookup.hot_rows("page").generation == 2


def test_what_a_row_learned_is_not_lost_when_it_leaves():
    torch.manual_seed(3)
    # Cores of full rank can store any row that is written back.
    lookup = make(shards=[shard(ranks=16, cache_size=10)])
    device = torch.device("cpu")
    old, new = torch.arange(10), torch.arange(100, 110)
    bags = tt.Bags(old, torch.arange(11), torch.ones(10), 10)
    call(lookup, bags)
    lookup.populate_caches()
    for _ in range(20):
        (call(lookup, bags) - 1.0).square().sum().backward()
    learned = full_table(lookup)[old]
    for _ in range(9):
        call(lookup, tt.Bags(new, torch.arange(11), torch.ones(10), 10).to(device))
    for _ in range(5):  # each populate halves the counts of the old ids
        lookup.populate_caches()
        call(lookup, tt.Bags(new, torch.arange(11), torch.ones(10), 10))
    lookup.populate_caches()
    assert sorted(lookup.hot_rows("page").ids.tolist()) == new.tolist()
    from_cores = full_table(lookup)[old]
    assert (from_cores - learned).square().sum() < 0.05 * learned.square().sum()


@pytest.mark.parametrize("forwards", [0, 2], ids=["just_chosen", "between_choices"])
def test_saved_state_continues_alike(forwards):
    def train(lookup, seed):
        torch.manual_seed(seed)
        for _ in range(4):
            out = call(lookup, skewed_bags("cpu"))
            out.backward(torch.randn_like(out))

    def run():
        return make(optimizer="adam", shards=[shard(cache_populate_every=3)])

    lookup, other = run(), run()
    train(lookup, 1)
    lookup.populate_caches()
    for _ in range(forwards):
        call(lookup, skewed_bags("cpu"))
    state = lookup.export_table("page")
    spec = BACKEND.state_spec(shard(), SPECS["adam"])
    assert {k: (tuple(t.shape), t.dtype) for k, t in state.items()} == {
        k: (s.shape, s.dtype) for k, s in spec.items()
    }
    other.load_table("page", state)
    train(lookup, 2)
    train(other, 2)
    assert torch.equal(lookup.hot_rows("page").ids, other.hot_rows("page").ids)
    assert torch.equal(lookup.hot_rows("page").rows, other.hot_rows("page").rows)
    assert all(map(torch.equal, lookup.cores("page"), other.cores("page")))


def test_a_cache_of_another_size_is_refused():
    state = warmed().export_table("page")
    other = make(shards=[shard(cache_size=21)])
    with pytest.raises(ValueError, match=r"'tt_cache_ids' has shape \(20,\)"):
        other.load_table("page", state)
    without = make(shards=[shard(cache_size=0)])
    with pytest.raises(ValueError, match="lacks 'tt_cache_ids'"):
        other.load_table("page", without.export_table("page"))
    # A table without a cache ignores the state.
    without.load_table("page", state)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", None])
def test_storage_counts_the_cache(optimizer):
    lookup = make(optimizer=optimizer)
    call(lookup, skewed_bags("cpu"))  # the first ids allocate the counts
    hot = lookup.hot_rows("page")
    taken = sum(t.nbytes for t in (hot.rows, hot.states, hot.ids))
    taken += hot._counts._group.host_bytes(0)
    if optimizer is not None:
        taken += hot.rows.nbytes + hot.size  # an update's gradient, and the ids of its rows
    spec = None if optimizer is None else SPECS[optimizer]
    for device in ("cpu", "cuda"):
        with_cache = BACKEND.storage(shard(), spec, device)
        without = BACKEND.storage(shard(cache_size=0), spec, device)
        more = (with_cache.hbm + with_cache.host) - (without.hbm + without.host)
        assert more == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cache_size": -1}, "cache_size is -1"),
        ({"cache_size": 2.0}, r"cache_size is 2\.0"),
        ({"cache_counted_ids": 9}, "cache_counted_ids is 9, but cache_size is 0"),
        ({"cache_populate_every": 9}, "cache_populate_every is 9, but cache_size is 0"),
        ({"cache_size": 9, "cache_counted_ids": 8}, "must be an integer from 9 to"),
        ({"cache_size": 9, "cache_populate_every": 0}, "must be an integer from 1 to"),
    ],
)
def test_impossible_options(options, match):
    with pytest.raises(ValueError, match=match):
        TTOptions(**options)


def test_refused_tables():
    with pytest.raises(ValueError, match="table 'page': cache_size is 301, but the table has 300"):
        BACKEND.check(shard(cache_size=301), None, "cpu")
    with pytest.raises(ValueError, match=r"table 'page': .*hot rows are trained by SGD, Adagrad"):
        BACKEND.check(shard(), OptimizerSpec("sgd", momentum=0.9), "cpu")
    BACKEND.check(shard(cache_size=0), OptimizerSpec("sgd", momentum=0.9), "cpu")
    with pytest.raises(ValueError, match="table 'page' has no cache"):
        make(shards=[shard(cache_size=0)]).hot_rows("page")
    assert make(shards=[shard(cache_size=0)]).populate_caches() == 0


def test_ids_outside_of_the_table_change_nothing():
    lookup = warmed()
    counted = lookup.hot_rows("page").frequencies()
    with pytest.raises(ValueError, match=rf"table 'page' was asked for id {ROWS}"):
        call(lookup, tt.Bags(torch.tensor([1, ROWS]), torch.tensor([0, 2]), torch.ones(2), 1))
    assert all(map(torch.equal, counted, lookup.hot_rows("page").frequencies()))
