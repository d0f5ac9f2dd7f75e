"""The cache of hot rows: which ids it holds, how rows train, and what happens when they leave."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.tensor_train.test_fused_update import (
    LEARNING_RATE,
    adagrad,
    rowwise_adagrad,
    sgd,
)
from torchrec_hkv import OptimType, TTEmbeddingBag
from torchrec_hkv.tensor_train import make_shape

ROWS, DIM = 400, 8


def make(device="cpu", cache_size=30, **arguments):
    arguments = {"tt_ranks": 4, "sparse": False, "weight_dist": "normal", **arguments}
    return TTEmbeddingBag(
        ROWS, DIM, use_cache=True, cache_size=cache_size, device=device, **arguments
    )


def skewed_ids(n, first=0):
    """Ids with the highest frequency near ``first`` and a long tail."""
    return ((torch.rand(n) ** 4 * ROWS).long() + first) % ROWS


def uncached_id(bag):
    """The smallest id outside of the cache."""
    hot = bag.hot_rows.ids
    return (~torch.isin(torch.arange(ROWS, device=hot.device), hot)).nonzero()[0, 0]


def offsets_of(ids, bags):
    return torch.linspace(0, ids.numel(), bags + 1).long()[:-1].to(ids.device)


def test_holds_the_most_frequent_ids(device_type):
    bag = make(device_type, hashtbl_size=ROWS)
    counts = torch.zeros(ROWS, dtype=torch.long)
    for _ in range(5):
        ids = skewed_ids(300)
        counts += torch.bincount(ids, minlength=ROWS)
        bag(ids.to(device_type), offsets_of(ids, 20).to(device_type))
    bag.cache_populate()
    order = torch.argsort(counts, descending=True, stable=True)[:30]  # ties: the smaller id wins
    assert sorted(bag.hot_rows.ids.tolist()) == sorted(order.tolist())
    bag.eval()
    bag.reset_cache_hit_rate()
    ids = skewed_ids(500)
    bag(ids.to(device_type), offsets_of(ids, 20).to(device_type))
    assert bag.cache_hit_rate == pytest.approx(torch.isin(ids, order).float().mean().item())
    # Evaluation does not count frequencies; populating has halved them.
    ids, halved = bag.hot_rows.frequencies()
    assert torch.equal(halved.cpu(), counts[ids.cpu()] // 2)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("autograd", [torch.no_grad, torch.inference_mode])
def test_without_autograd_nothing_is_counted(device_type, sparse, autograd):
    bag = make(device_type, sparse=sparse, cache_populate_every=2)
    ids = skewed_ids(100).to(device_type)
    offsets = offsets_of(ids, 20)
    expected = bag(ids, offsets).detach()
    before = [tensor.clone() for tensor in bag.hot_rows.frequencies()]
    with autograd():
        for _ in range(4):
            out = bag(ids, offsets)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, bag.hot_rows.frequencies(), before))
    assert bag.hot_rows.num_rows == 0  # without populating


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup_and_gradients_are_those_of_the_full_weight(device_type, mode, weighted):
    bag = make(device_type, mode=mode)
    bag(skewed_ids(300).to(device_type), torch.tensor([0], device=device_type))
    bag.cache_populate()
    bag.hot_rows.rows.data += torch.randn_like(bag.hot_rows.rows)
    bags = tt.random_bags([bag.shape], [0], 20, 8).to(device_type)
    bags.ids[:2] = torch.stack([bag.hot_rows.ids[0], uncached_id(bag)])  # one hit and one miss
    ids, starts = bags.ids, bags.offsets[:-1]
    weights = bags.weights.requires_grad_() if weighted else None
    out = bag(ids, starts, weights)
    table = tt.dense_table(bag.shape, list(bag.tt_cores))
    rows = bag.hot_rows.rows
    full = table.index_put((bag.hot_rows.ids,), rows.double())
    expected = tt.reference_lookup([full], [0], bags, weights=weights, mean=mode == "mean")
    tt.assert_near(out, expected)
    tt.assert_near(bag.full_weight(), full)
    assert 0 < bag.cache_hit_rate < 1
    inputs = [*bag.tt_cores, rows, *([weights] if weighted else [])]
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    for one, other in zip(actual, wanted, strict=True):
        tt.assert_near(one, other)


def adam(rows, grad, state, step):
    first = state.setdefault("first", torch.zeros_like(rows))
    second = state.setdefault("second", torch.zeros_like(rows))
    touched = (grad != 0).any(dim=1)  # like torch.optim.SparseAdam: other rows do not change
    first[touched] = 0.9 * first[touched] + 0.1 * grad[touched]
    second[touched] = 0.999 * second[touched] + 0.001 * grad[touched] ** 2
    root = (second[touched] / (1 - 0.999**step)).sqrt() + 0.1
    rows[touched] -= LEARNING_RATE * first[touched] / (1 - 0.9**step) / root


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        (OptimType.SGD, sgd),
        (OptimType.EXACT_ADAGRAD, adagrad),
        (OptimType.EXACT_ROWWISE_ADAGRAD, rowwise_adagrad),
        (OptimType.ADAM, adam),
    ],
)
def test_cached_rows_train_by_the_fused_optimizer(device_type, kind, formula):
    bag = make(device_type, sparse=True, optimizer=kind, learning_rate=LEARNING_RATE, eps=0.1)
    hot = torch.arange(30, device=device_type)
    bag(hot, hot)
    bag.cache_populate()
    rows, state = bag.full_weight()[:30].double().cpu(), {}
    for step in range(1, 5):
        # All ids are cached, so the cores do not change.
        ids = torch.randint(0, 25, (40,))
        starts, grad = offsets_of(ids, 10), torch.randn(10, DIM)
        out = bag(ids.to(device_type), starts.to(device_type))
        out.backward(grad.to(device_type))
        rows.requires_grad_()
        pooled = torch.nn.functional.embedding_bag(ids, rows, starts, mode="sum")
        (gradient,) = torch.autograd.grad(pooled, rows, grad.double())
        rows = rows.detach()
        formula(rows, gradient, state, step)
    tt.assert_near(bag.full_weight()[:30], rows)


def test_rows_that_stay_keep_row_state_and_place():
    bag = make(sparse=True, optimizer=OptimType.ADAM)
    ids = torch.arange(30)
    bag(ids, ids)
    bag.cache_populate()
    for _ in range(3):
        bag(ids, ids).square().sum().backward()
    bag(torch.arange(390, 395).repeat(10), torch.tensor([0]))  # five more ids are counted
    hot = bag.hot_rows
    before = {
        int(i): (k, hot.rows[k].clone(), hot.states[k].clone()) for k, i in enumerate(hot.ids)
    }
    bag.cache_populate()
    after = {int(i): (k, hot.rows[k], hot.states[k]) for k, i in enumerate(hot.ids)}
    stay = set(before) & set(after)
    assert len(stay) == 25
    assert set(range(390, 395)) <= set(after)
    for id_ in stay:
        assert before[id_][0] == after[id_][0]
        assert torch.equal(before[id_][1], after[id_][1])
        assert torch.equal(before[id_][2], after[id_][2])
    for id_ in range(390, 395):
        assert float(after[id_][2].abs().sum()) == 0


def test_populate_changes_no_row_that_comes_or_stays():
    bag = make()
    for ids in (skewed_ids(500), skewed_ids(800, first=200)):
        bag(ids, torch.tensor([0]))
        bag.hot_rows.rows.data += 0.1 * torch.randn_like(bag.hot_rows.rows)
        before = bag.full_weight()
        bag.cache_populate()
        kept = bag.hot_rows.ids[bag.hot_rows.ids < ROWS]
        tt.assert_near(bag.full_weight()[kept], before[kept])


class Regression:
    """Regression of rows; ids have a skewed distribution that moves."""

    def __init__(self, target, **arguments):
        self.bag = make(
            sparse=True, optimizer=OptimType.EXACT_ADAGRAD, learning_rate=0.1, **arguments
        )
        self.target = target

    def train(self, steps, first=0):
        for _ in range(steps):
            ids = skewed_ids(256, first)
            out = self.bag(ids, torch.arange(256))
            (out - self.target[ids]).square().sum(dim=1).mean().backward()

    def losses(self):
        """The loss of each id."""
        return (self.bag.full_weight() - self.target).square().sum(dim=1)


def populated_after_a_move(target, **arguments):
    """Trains on some ids, then on others, and populates the cache, which evicts some of the first.

    Returns losses weighted by the present frequencies: before, after, and if the evicted rows had
    been dropped.
    """
    run = Regression(target, **arguments)
    run.train(10)
    run.bag.cache_populate()
    run.train(80)
    cached = run.bag.hot_rows.ids.clone()
    run.train(300, first=200)
    now = torch.bincount(skewed_ids(1_000_000, first=200), minlength=ROWS)
    before = run.losses()
    cores_alone = tt.dense_table(run.bag.shape, list(run.bag.tt_cores)).float().detach()
    run.bag.cache_populate()
    left = cached[~torch.isin(cached, run.bag.hot_rows.ids)]
    assert left.numel() > 4
    dropped = before.clone()
    dropped[left] = (cores_alone - run.target)[left].square().sum(dim=1)
    assert before[left].mean() < 0.5 * dropped[left].mean()  # the evicted rows had learned
    return [float((now * losses).sum()) for losses in (before, run.losses(), dropped)]


def test_loss_does_not_rise_at_a_populate():
    # Rows that the cores can represent.
    shape = make_shape(ROWS, DIM, ranks=3)
    torch.manual_seed(5)
    target = tt.dense_table(shape, tt.random_cores(shape)).float()
    before, after, dropped = populated_after_a_move(target, tt_ranks=8, hashtbl_size=ROWS)
    assert dropped > 1.2 * before  # as FBTT-Embedding does
    assert after <= before


def test_loss_rises_less_than_without_writing_back_where_cores_are_too_small():
    torch.manual_seed(5)
    target = torch.randn(ROWS, 4) @ torch.randn(4, DIM)
    before, after, dropped = populated_after_a_move(target, tt_ranks=4, hashtbl_size=ROWS)
    assert before < after < dropped


def test_counts_are_halved_and_the_cache_follows_the_ids():
    bag = make(cache_size=10)
    old, new = torch.arange(10), torch.arange(50, 60)
    for _ in range(8):
        bag(old, torch.tensor([0]))
    for _ in range(3):
        bag.cache_populate()
    for _ in range(2):
        bag(new, torch.tensor([0]))
    bag.cache_populate()
    assert sorted(bag.hot_rows.ids.tolist()) == new.tolist()


def test_populates_by_schedule():
    bag = make(cache_populate_every=3)
    ids = skewed_ids(200)
    for step in range(7):
        bag(ids, torch.tensor([0]))
        assert bag.hot_rows.generation == step // 3
    assert bag.hot_rows.num_rows == 30
    bag.eval()
    for _ in range(9):
        bag(ids, torch.tensor([0]))
    assert bag.hot_rows.generation == 2


@pytest.mark.parametrize("sparse", [False, True])
def test_populate_between_forward_and_backward_is_refused(sparse):
    bag = make(sparse=sparse)
    ids = torch.arange(30)
    bag(ids, ids)
    bag.cache_populate()
    out = bag(ids, ids)
    bag.cache_populate()
    with pytest.raises(
        RuntimeError, match=r"cache_populate\(\) was called between a forward and its"
    ):
        out.sum().backward()


def test_populate_before_any_forward_does_nothing():
    bag = make()
    before = bag.full_weight()
    bag.cache_populate()
    assert bag.cache_hit_rate == 0
    assert bag.hot_rows.num_rows == 0
    assert torch.equal(bag.full_weight(), before)
