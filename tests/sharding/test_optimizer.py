"""Fused optimizers: those that backends train with, and their arguments."""

from __future__ import annotations

import pytest
import torch
import torchrec.optim
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_hkv.backends import OptimizerSpec
from torchrec_hkv.sharding.optimizer import RowOptimizer, applied_optimizer


def _applied(optimizer, kwargs, fused_params=None):
    parameter = nn.Parameter(torch.empty(2, 2, device="meta"))
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, [parameter], kwargs)
    return applied_optimizer("t", parameter, fused_params)


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "spec"),
    [
        (torch.optim.SGD, {"lr": 0.1}, OptimizerSpec("sgd")),
        (torchrec.optim.SGD, {"lr": 0.1, "momentum": 0}, OptimizerSpec("sgd")),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.0}, OptimizerSpec("sgd")),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}, OptimizerSpec("rowwise_adagrad", 1e-8)),
        (
            torchrec.optim.RowWiseAdagrad,
            {"lr": 0.1, "eps": 1e-3},
            OptimizerSpec("rowwise_adagrad", 1e-3),
        ),
        (None, {}, None),
    ],
)
def test_served(optimizer, kwargs, spec):
    assert _applied(optimizer, kwargs) == spec


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "message"),
    [
        (torch.optim.Adam, {"lr": 0.1}, "can't be trained with"),
        (torchrec.optim.Adagrad, {"lr": 0.1}, "can't be trained with"),
        (torch.optim.RMSprop, {"lr": 0.1}, "can't be trained with RMSprop"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum=0.9"),
        (torch.optim.SGD, {"lr": 0.1, "maximize": True}, "maximize=True"),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}, "weight_decay=0.1"),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "max_gradient": 1.0}, "max_gradient=1.0"),
        (
            torchrec.optim.RowWiseAdagrad,
            {"lr": 0.1, "initial_accumulator_value": 0.1},
            "initial_accumulator_value=0.1",
        ),
    ],
)
def test_refused(optimizer, kwargs, message):
    with pytest.raises(ValueError, match=message) as refusal:
        _applied(optimizer, kwargs)
    assert str(refusal.value).startswith("Table 't' can't be trained with")
    assert "RowWiseAdagrad, with lr and eps" in str(refusal.value)


def test_a_sharders_parameters_about_stock_storage_are_passed_over():
    assert _applied(
        torch.optim.SGD, {"lr": 0.1}, {"prefetch_pipeline": True, "cache_load_factor": 0.1}
    ) == OptimizerSpec("sgd")


def test_two_optimizers_are_refused():
    parameter = nn.Parameter(torch.empty(2, 2, device="meta"))
    for _ in range(2):
        apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    with pytest.raises(ValueError, match="has 2 optimizers"):
        applied_optimizer("t", parameter, None)


def test_the_learning_rate_is_that_of_the_parameter_group():
    optimizer = RowOptimizer({"t.weight": nn.Parameter(torch.empty(0, 4))}, 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    assert optimizer.learning_rate == 0.5
    optimizer.step()
    scheduler.step()
    assert optimizer.learning_rate == pytest.approx(0.05)
