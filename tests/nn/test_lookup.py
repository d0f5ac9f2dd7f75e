"""Lookups: shapes, padding, evaluation, memory formats."""

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables, rows_of
from torchrec_hkv import HKVAdamOptimizer, HKVOptimizer
from torchrec_hkv.hash_table import Normal, Uniform, initial_rows

UP_TO = Uniform(-0.5, 0.5)  # 4 ** -0.5
EXTREMES = [-(2**63), -1, 0, 2**62, 2**63 - 1]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0, 3), (2, 3), (2, 1, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_any_shape(shape, dtype, device_type):
    embedding = make_embedding(device=device_type)
    ids = torch.randint(-50, 50, shape, dtype=dtype, device=device_type)
    rows = embedding(ids)
    assert rows.shape == (*shape, 4)
    expected = initial_rows(ids.flatten().long(), 4, table="embedding", seed=7, initializer=UP_TO)
    assert torch.equal(rows.detach().reshape(-1, 4), expected)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_any_shape_trains(shape, device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    ids = torch.arange(torch.Size(shape).numel(), device=device_type).view(shape)
    before = embedding(ids)
    before.sum().backward()
    optimizer.step()
    torch.testing.assert_close(embedding(ids).detach(), before.detach() - 0.5)


def test_ids_and_gradients_of_any_strides(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    ids = torch.arange(24, device=device_type).view(4, 6).T[1::2]
    grads = torch.randn(4, 4, 3, device=device_type).permute(2, 1, 0)
    before = embedding(ids)
    before.backward(grads)
    optimizer.step()
    torch.testing.assert_close(embedding(ids).detach(), before.detach() - 0.5 * grads)


def test_every_int64_is_an_id(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    ids = torch.tensor(EXTREMES, device=device_type)
    before = embedding(ids)
    before.sum().backward()
    optimizer.step()
    torch.testing.assert_close(embedding(ids).detach(), before.detach() - 0.5)


@pytest.mark.parametrize("padding_idx", [0, -1, 5])
def test_padding_is_zeros_and_stays_so(padding_idx, device_type):
    embedding = make_embedding(device=device_type, padding_idx=padding_idx)
    optimizer = HKVAdamOptimizer(embedding, lr=0.5, weight_decay=0.1)
    ids = torch.tensor([padding_idx, 3, padding_idx, 4], device=device_type)
    for _ in range(3):
        rows = embedding(ids)
        assert (rows[[0, 2]] == 0).all()
        assert (rows[[1, 3]] != 0).any()
        rows.sum().backward()
        optimizer.step()
    embedding.eval()
    assert (embedding(ids)[0] == 0).all()
    embedding.padding_idx = None
    untouched = initial_rows(ids[:1], 4, table="embedding", seed=7, initializer=UP_TO)
    assert torch.equal(embedding(ids[:1]), untouched)


def test_padding_of_several_tables(device_type):
    tables = make_tables(2, device=device_type, padding_idx=9)
    optimizer = HKVOptimizer(tables, lr=0.5)
    ids = [torch.tensor([9, 1, 2], device=device_type), torch.tensor([3, 9], device=device_type)]
    before = tables(ids)
    sum(rows.sum() for rows in before).backward()
    optimizer.step()
    after = tables(ids)
    assert (after[0][0] == 0).all()
    assert (after[1][1] == 0).all()
    torch.testing.assert_close(after[0][1:].detach(), before[0][1:].detach() - 0.5)
    torch.testing.assert_close(after[1][0].detach(), before[1][0].detach() - 0.5)


def _evaluating(embedding):
    embedding.eval()
    return torch.enable_grad()


def _frozen(embedding):
    embedding.requires_grad_(False)
    return torch.enable_grad()


@pytest.mark.parametrize(
    "mode",
    [_evaluating, _frozen, lambda _: torch.no_grad(), lambda _: torch.inference_mode()],
    ids=["eval", "requires_grad_(False)", "no_grad", "inference_mode"],
)
def test_evaluation_changes_nothing(mode, device_type):
    embedding = make_embedding(device=device_type)
    there = torch.arange(5, device=device_type)
    trained = embedding(there).detach()
    counters = embedding.counters()
    with mode(embedding):
        rows = embedding(torch.arange(10, device=device_type))
    assert not rows.requires_grad
    assert torch.equal(rows[:5], trained)
    expected = initial_rows(
        torch.arange(5, 10, device=device_type), 4, table="embedding", seed=7, initializer=UP_TO
    )
    assert torch.equal(rows[5:], expected)
    assert embedding.counters() == counters


def test_least_recently_looked_up_ids_leave(device_type):
    embedding = make_embedding(device=device_type, max_capacity=64, init_capacity=64)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    initial = rows_of(embedding, list(range(64)))
    for start in (0, 32, 64):  # the third batch evicts ids of the first
        embedding(torch.arange(start, start + 32, device=device_type)).sum().backward()
        optimizer.step()
    assert embedding.counters()["embedding"]["evicted"] == 32
    assert torch.equal(rows_of(embedding, list(range(32))), initial[:32])
    torch.testing.assert_close(rows_of(embedding, list(range(32, 64))), initial[32:] - 0.5)


def test_torch_manual_seed_decides_initial_rows(device_type):
    def rows(seed):
        torch.manual_seed(seed)
        first, second = (make_embedding(device=device_type, seed=None) for _ in range(2))
        return rows_of(first, [1, 2]), rows_of(second, [1, 2])

    assert torch.equal(rows(0)[0], rows(0)[0])
    assert torch.equal(rows(0)[1], rows(0)[1])
    assert not torch.equal(rows(0)[0], rows(0)[1])
    assert not torch.equal(rows(0)[0], rows(1)[0])


def test_initializer(device_type):
    embedding = make_embedding(8, device_type, initializer=Normal(5.0, 0.1))
    assert (rows_of(embedding, list(range(1000))) - 5).std() == pytest.approx(0.1, rel=0.05)


def test_tables_are_as_embeddings_by_themselves(device_type):
    tables = make_tables(3, device=device_type)
    ids = torch.arange(6, device=device_type)
    first, second, third = tables([ids.view(2, 3), ids[:1], ids.view(3, 2).T])
    assert (first.shape, second.shape, third.shape) == ((2, 3, 4), (1, 4), (2, 3, 4))
    for name, rows, of in (
        ("table_0", first, ids),
        ("table_1", second, ids[:1]),
        ("table_2", third, ids.view(3, 2).T),
    ):
        expected = initial_rows(of.flatten(), 4, table=name, seed=7, initializer=UP_TO)
        assert torch.equal(rows.detach().reshape(-1, 4), expected)


def test_a_table_whose_rows_are_not_used_is_not_trained(device_type):
    tables = make_tables(2, device=device_type)
    optimizer = HKVOptimizer(tables, lr=0.5)
    ids = torch.arange(6, device=device_type)
    before = [rows.detach() for rows in tables([ids, ids])]
    tables([ids, ids])[1].sum().backward()
    optimizer.step()
    after = tables([ids, ids])
    assert torch.equal(after[0].detach(), before[0])
    torch.testing.assert_close(after[1].detach(), before[1] - 0.5)
