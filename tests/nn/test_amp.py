"""Autocast and GradScaler."""

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables, rows_of
from torchrec_hkv import HKVAdagrad, HKVAdamOptimizer, HKVOptimizer

IDS = list(range(5))


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.embedding = make_embedding(device=device)
        self.dense = torch.nn.Linear(4, 4).to(device)

    def forward(self, ids):
        return self.dense(self.embedding(ids)).float().square().sum()


@pytest.fixture
def model(device_type):
    torch.manual_seed(0)
    return Model(device_type)


@pytest.fixture
def ids(device_type):
    return torch.tensor(IDS, device=device_type)


def test_rows_are_float32_under_autocast(model, ids, device_type):
    with torch.autocast(device_type, dtype=torch.bfloat16):
        assert model.embedding(ids).dtype == torch.float32
        assert model.dense(model.embedding(ids)).dtype == torch.bfloat16


@pytest.mark.parametrize("unscales", [False, True], ids=["scaler.step", "unscale_, scaler.step"])
@pytest.mark.parametrize("autocast", [False, True], ids=["no autocast", "autocast"])
def test_scaled_gradients_train_as_unscaled_ones(unscales, autocast, model, ids, device_type):
    plain = Model(device_type)
    plain.dense.load_state_dict(model.dense.state_dict())
    scaler = torch.amp.GradScaler(device_type, init_scale=2.0**12)
    optimizers = [HKVAdagrad(each.embedding, lr=0.1, eps=0.1) for each in (model, plain)]
    for _ in range(5):
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=autocast):
            losses = [model(ids) + model(ids[:2]), plain(ids) + plain(ids[:2])]
        scaler.scale(losses[0]).backward()
        if unscales:
            scaler.unscale_(optimizers[0])
            torch.nn.utils.clip_grad_norm_(model.dense.parameters(), 1.0)
        scaler.step(optimizers[0])
        scaler.update()
        losses[1].backward()
        optimizers[1].step()
    scaled, expected = rows_of(model.embedding, IDS), rows_of(plain.embedding, IDS)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-6)


def test_several_tables_under_a_scaler(device_type):
    tables, plain = (make_tables(2, device=device_type) for _ in range(2))
    scaler = torch.amp.GradScaler(device_type, init_scale=2.0**12)
    optimizers = [HKVAdamOptimizer(each, lr=0.1) for each in (tables, plain)]
    ids = [torch.arange(4, device=device_type), torch.arange(3, 9, device=device_type)]
    for _ in range(3):
        with torch.autocast(device_type, dtype=torch.bfloat16):
            rows = tables(ids)
        assert all(part.dtype == torch.float32 for part in rows)
        scaler.scale(sum(part.square().sum() for part in rows)).backward()
        scaler.step(optimizers[0])
        scaler.update()
        sum(part.square().sum() for part in plain(ids)).backward()
        optimizers[1].step()
    with torch.no_grad():
        for scaled, expected in zip(tables(ids), plain(ids), strict=True):
            torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("unscales", [False, True], ids=["scaler.step", "unscale_, scaler.step"])
def test_a_gradient_that_is_not_finite_is_skipped(unscales, model, ids, device_type):
    """The scaler detects it from the second time on: a backward does not check without a scaler."""
    scaler = torch.amp.GradScaler(device_type, init_scale=16.0, growth_interval=10**6)
    embedding = model.embedding
    optimizer = HKVAdamOptimizer(embedding, lr=0.1)
    before = rows_of(embedding, IDS)

    def step(factor):
        scaler.scale((embedding(ids) * factor).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(3):
        step(float("inf"))
    assert torch.equal(rows_of(embedding, IDS), before)
    assert scaler.get_scale() == 4.0
    step(1.0)
    # Skipped steps do not count: this is Adam's first one.
    torch.testing.assert_close(rows_of(embedding, IDS), before - 0.1, rtol=0, atol=1e-6)


def test_clipping_between_unscaling_and_the_step(model, ids, device_type):
    scaler = torch.amp.GradScaler(device_type, init_scale=2.0**12)
    optimizer = HKVOptimizer(model.embedding, lr=0.5)
    before = rows_of(model.embedding, IDS)
    loss = model.embedding(ids).sum() + model.dense.weight.sum() / 2
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for parameter in model.dense.parameters():  # as ``unscale_`` of their optimizer does
        if parameter.grad is not None:
            parameter.grad /= 2.0**12
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm.item() == pytest.approx(2.0)
    scaler.step(optimizer)
    torch.testing.assert_close(rows_of(model.embedding, IDS), before - 0.125, rtol=0, atol=1e-6)


def test_a_scaler_serves_rows_and_the_rest(model, ids, device_type):
    scaler = torch.amp.GradScaler(device_type, init_scale=2.0**10)
    rows, dense = HKVOptimizer(model.embedding, lr=0.05), torch.optim.SGD(model.dense.parameters())
    losses = []
    for _ in range(20):
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = model(ids)
        scaler.scale(loss).backward()
        for optimizer in (rows, dense):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
