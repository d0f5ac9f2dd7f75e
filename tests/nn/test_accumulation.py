"""Gradients of several backwards are held in bounded memory and applied once."""

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables, rows_of
from torchrec_hkv import HKVAdagrad, HKVAdamOptimizer, HKVOptimizer, HKVSparseAdam

IDS = list(range(-20, 20))
BYTES_AN_ID = 4 * 4 + 3 * 8


def batch(seed, device, shape=(6,)):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-20, 20, shape, generator=generator)
    grads = (8 * torch.randn(*shape, 4, generator=generator)).round() / 8
    return ids.to(device), grads.to(device)


def buffer_for(ids):
    """GiB for the gradients of this many ids, and slightly more."""
    return (ids * BYTES_AN_ID + 16) / 2**30


@pytest.mark.parametrize("optimizer", [HKVOptimizer, HKVAdamOptimizer, HKVAdagrad, HKVSparseAdam])
@pytest.mark.parametrize("room", [1000, 45], ids=["as they come", "added up"])
def test_several_backwards_are_one_of_the_sum(optimizer, room, device_type):
    whole = make_embedding(device=device_type)
    parts = make_embedding(device=device_type, grad_buffer_hbm_gb=buffer_for(room))
    for module in (whole, parts):
        trained_by = optimizer(module, lr=0.1)
        for step in range(4):
            batches = [batch(10 * step + k, device_type, (4 + k, 3)) for k in range(5)]
            losses = [(module(ids) * grads).sum() for ids, grads in batches]
            if module is whole:
                sum(losses).backward()
            else:
                for loss in losses:
                    loss.backward()
            trained_by.step()
            trained_by.zero_grad()
    assert not torch.equal(rows_of(whole, IDS), rows_of(make_embedding(device=device_type), IDS))
    torch.testing.assert_close(rows_of(parts, IDS), rows_of(whole, IDS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("room", [1000, 30], ids=["as they come", "added up"])
def test_several_tables_of_other_sizes(room, device_type):
    tables = make_tables(device=device_type, grad_buffer_hbm_gb=3 * buffer_for(room))
    alone = [make_embedding(device=device_type) for _ in range(3)]
    optimizers = [HKVOptimizer(tables, lr=0.1), HKVOptimizer(alone, lr=0.1)]
    before = [[t.cpu() for t in module_rows(tables)], [rows_of(each, IDS) for each in alone]]
    for k in range(6):
        batches = [batch(10 * k + t, device_type, (2 + 3 * t,)) for t in range(3)]
        rows = tables([ids for ids, _ in batches])
        sum((r * g).sum() for r, (_, g) in zip(rows, batches, strict=True)).backward()
        for module, (ids, grads) in zip(alone, batches, strict=True):
            (module(ids) * grads).sum().backward()
    as_they_came = 6 * (8 * 3 * 16 + 2 * 15 * 8 + 25 * 8)
    assert (tables.grad_buffer_bytes == as_they_came) == (room == 1000)
    for each in optimizers:
        each.step()
    for table in range(3):
        actual = module_rows(tables)[table].cpu() - before[0][table]
        expected = rows_of(alone[table], IDS) - before[1][table]
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def module_rows(tables):
    ids = torch.tensor(IDS, device=tables.device)
    with torch.no_grad():
        return tables([ids] * 3)


def test_a_step_applies_gradients_once(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    ids = torch.arange(5, device=device_type)
    before = embedding(ids).detach()
    embedding(ids).sum().backward()
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(embedding(ids).detach(), before - 0.5)
    assert embedding.grad_buffer_bytes == 0


def test_a_step_without_gradients_does_not_count(device_type):
    """Adam's bias correction would differ if the step counted."""
    embeddings = [make_embedding(device=device_type) for _ in range(2)]
    for embedding, idle in zip(embeddings, (0, 3), strict=True):
        optimizer = HKVAdamOptimizer(embedding, lr=0.1)
        for seed in range(2):
            for _ in range(idle):
                optimizer.step()
            ids, grads = batch(seed, device_type)
            (embedding(ids) * grads).sum().backward()
            optimizer.step()
    assert torch.equal(rows_of(embeddings[0], IDS), rows_of(embeddings[1], IDS))


def test_a_graph_may_be_walked_twice(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    ids = torch.arange(5, device=device_type)
    rows = embedding(ids)
    rows.sum().backward(retain_graph=True)
    (2 * rows).sum().backward()
    optimizer.step()
    torch.testing.assert_close(embedding(ids).detach(), rows.detach() - 1.5)


def test_a_graph_may_be_walked_again_after_a_step(device_type):
    """The new step skips ids that were evicted in between, and finds ids that returned."""
    embedding = make_embedding(device=device_type, max_capacity=64, init_capacity=64)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    rows = embedding(torch.arange(5, device=device_type))
    rows.sum().backward(retain_graph=True)
    optimizer.step()
    embedding(torch.arange(100, 164, device=device_type))  # output dropped; evicts all others
    embedding(torch.tensor([4, 2], device=device_type))  # return to the table
    before = {id: rows_of(embedding, [id]) for id in [*range(5), *range(100, 164)]}
    rows.sum().backward()
    optimizer.step()
    for id, row in before.items():
        moved = 0.5 if id in (4, 2) else 0.0
        torch.testing.assert_close(rows_of(embedding, [id]), row - moved)


def test_many_lookups_wait_for_one_backward(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    ids = torch.arange(5, device=device_type)
    before = embedding(ids).detach()
    sum(embedding(ids).sum() for _ in range(200)).backward()
    optimizer.step()
    torch.testing.assert_close(embedding(ids).detach(), before - 100)


def test_rows_of_held_gradients_are_not_evicted(device_type):
    embedding = make_embedding(device=device_type, max_capacity=64, init_capacity=64)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    first = torch.arange(40, device=device_type)
    before = embedding(first).detach()
    embedding(first).sum().backward()
    for start in range(1000, 2000, 100):
        others = torch.arange(start, start + 40, device=device_type)
        embedding(others).sum().backward()
    assert embedding.counters()["embedding"]["refused"] > 0
    optimizer.step()
    torch.testing.assert_close(embedding(first).detach(), before - 0.5)
    assert embedding.counters()["embedding"]["evicted"] == 0
    embedding(others)
    assert embedding.counters()["embedding"]["evicted"] > 0


def test_gradients_are_found_again_when_the_table_has_grown(device_type):
    embedding = make_embedding(device=device_type, init_capacity=64)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    first = torch.arange(40, device=device_type)
    before = embedding(first).detach()
    embedding(first).sum().backward()
    late = embedding(first).sum()
    embedding(torch.arange(1000, 3000, device=device_type)).sum().backward()
    late.backward()
    optimizer.step()
    torch.testing.assert_close(embedding(first).detach(), before - 1)


def test_a_full_buffer_is_refused_and_keeps_what_it_held(device_type):
    embedding = make_embedding(device=device_type, grad_buffer_hbm_gb=buffer_for(20))
    optimizer = HKVOptimizer(embedding, lr=0.5)
    first = torch.arange(20, device=device_type)
    before = embedding(first).detach()
    embedding(first).sum().backward()
    embedding(first).sum().backward()  # the same ids: gradients add up
    with pytest.raises(RuntimeError, match=r"but grad_buffer_hbm_gb is .*: call step\(\)"):
        embedding(first + 10).sum().backward()
    assert embedding.grad_buffer_bytes <= 20 * BYTES_AN_ID + 16
    optimizer.step()
    torch.testing.assert_close(embedding(first).detach(), before - 1)


def test_the_gradient_is_not_autograds_memory(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    ids = torch.arange(5, device=device_type)
    rows = embedding(ids)
    grad = torch.ones_like(rows)
    rows.backward(grad)
    grad.fill_(7)
    optimizer.step()
    torch.testing.assert_close(embedding(ids).detach(), rows.detach() - 0.5)
