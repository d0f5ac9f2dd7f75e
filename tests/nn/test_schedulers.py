"""torch.optim.lr_scheduler, closures and hooks work with the optimizers of rows."""

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables, rows_of
from torchrec_hkv import HKVAdamOptimizer, HKVOptimizer

IDS = [1, 2, 3]

SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 1.0, total_steps=10, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_steps_are_as_long_as_the_schedule_says(scheduler, device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=1.0)
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    schedule, theirs = SCHEDULERS[scheduler](optimizer), SCHEDULERS[scheduler](reference)
    ids = torch.tensor(IDS, device=device_type)
    for _ in range(8):
        before = rows_of(embedding, IDS)
        embedding(ids).sum().backward()
        optimizer.step()
        rate = reference.param_groups[0]["lr"]
        torch.testing.assert_close(rows_of(embedding, IDS), before - rate)
        reference.step()
        schedule.step()
        theirs.step()


def test_several_tables_follow_a_schedule(device_type):
    tables = make_tables(2, device=device_type)
    optimizer = HKVOptimizer(tables, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ids = [torch.tensor(IDS, device=device_type)] * 2
    with torch.no_grad():
        before = [rows.clone() for rows in tables(ids)]
    for _ in range(3):
        sum(rows.sum() for rows in tables(ids)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for rows, old in zip(tables(ids), before, strict=True):
            torch.testing.assert_close(rows, old - 1.75)


def test_a_learning_rate_may_be_a_tensor_on_the_device(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=torch.tensor(0.5, device=device_type))
    before = rows_of(embedding, IDS)
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"].fill_(rate)
        embedding(torch.tensor(IDS, device=device_type)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(rows_of(embedding, IDS), before - 0.75)


def test_a_rate_that_was_loaded_is_no_others(device_type):
    rate = torch.tensor(0.5, device=device_type)
    first = HKVOptimizer(make_embedding(device=device_type), lr=rate)
    second = HKVOptimizer(make_embedding(device=device_type), lr=0.1)
    second.load_state_dict(first.state_dict())
    rate.fill_(0.25)
    assert float(second.param_groups[0]["lr"]) == 0.5


def test_momentum_that_a_scheduler_cycles_is_refused(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVAdamOptimizer(embedding)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    before = rows_of(embedding, IDS)
    embedding(torch.tensor(IDS, device=device_type)).sum().backward()
    with pytest.raises(ValueError, match=r"betas was .* but only lr may change"):
        optimizer.step()
    assert schedule is not None
    assert torch.equal(rows_of(embedding, IDS), before)


def test_a_closure_is_evaluated(device_type):
    embedding = make_embedding(device=device_type)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    before = rows_of(embedding, IDS)

    def closure():
        optimizer.zero_grad()
        loss = embedding(torch.tensor(IDS, device=device_type)).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    torch.testing.assert_close(loss.detach().cpu(), before.sum())
    torch.testing.assert_close(rows_of(embedding, IDS), before - 0.5)


def test_step_hooks_run(device_type):
    optimizer = HKVOptimizer(make_embedding(device=device_type))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    assert calls == ["post"]
