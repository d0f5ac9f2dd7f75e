"""Loads refuse impossible learning rates of an optimizer before anything changes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

from torchrec_hkv.checkpoint.learning_rates import (
    check_learning_rates,
    learning_rates,
    put_learning_rates,
)


def _optimizer(**arguments):
    return KeyedOptimizerWrapper(
        {"w": torch.nn.Parameter(torch.ones(2))},
        lambda parameters: torch.optim.Adam(parameters, **arguments),
    )


def test_they_come_back():
    saved = learning_rates(_optimizer(lr=0.5, betas=(0.5, 0.75)))
    assert saved == {"w": {"lr": 0.5, "betas": [0.5, 0.75]}}
    fresh = _optimizer()
    check_learning_rates(fresh, saved, Path("c.json"))
    put_learning_rates(fresh, saved)
    assert learning_rates(fresh) == saved


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ({"betas": [0.1]}, r"betas is \[0.1\], but must be a list of 2 numbers"),
        ({"betas": 0.1}, "betas is 0.1, but must be a list of 2 numbers"),
        ({"lr": [0.1]}, r"lr is \[0.1\], but must be a number"),
        ({"lr": None}, "lr is None, but must be a number"),
    ],
)
def test_refused_in_a_load(saved, sentence):
    with pytest.raises(ValueError, match=rf"^c.json: learning_rates.w.{sentence}"):
        check_learning_rates(_optimizer(), {"w": saved}, Path("c.json"))


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_refused_in_a_save(rate):
    optimizer = _optimizer()
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ValueError, match=f"parameter 'w'.*lr is {rate}, but must be a finite"):
        learning_rates(optimizer)
