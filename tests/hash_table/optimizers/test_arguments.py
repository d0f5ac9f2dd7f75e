"""Optimizers refuse impossible arguments with one sentence."""

import math

import pytest

from torchrec_hkv.hash_table import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RowWiseAdagrad,
    RowWiseAdam,
    TableGroup,
    TableSpec,
)

NUMBER = r"must be a finite number, not negative\.$"


@pytest.mark.parametrize(
    ("kind", "arguments", "match"),
    [
        (
            SGD,
            {"momentum": 1.0},
            r"^SGD: momentum is 1.0, but must be at least 0 and less than 1\.$",
        ),
        (SGD, {"momentum": -0.1}, "momentum is -0.1"),
        (SGD, {"momentum": "0.9"}, "momentum is '0.9'"),
        (SGD, {"nesterov": True}, "nesterov is True, but must be False if momentum is 0"),
        (SGD, {"nesterov": 1, "momentum": 0.5}, "nesterov is 1, but must be True or False"),
        (SGD, {"weight_decay": -1}, NUMBER),
        (SGD, {"weight_decay": math.nan}, NUMBER),
        (SGD, {"weight_decay": True}, NUMBER),
        (SGD, {"weight_decay_mode": "l2"}, "is 'l2', but must be 'coupled' or 'decoupled'"),
        (Adagrad, {"eps": 0.0}, "Adagrad: eps is 0.0, but must be a finite positive number"),
        (Adagrad, {"initial_accumulator": -0.1}, NUMBER),
        (RowWiseAdagrad, {"eps": math.inf}, "RowWiseAdagrad: eps is inf"),
        (
            Adam,
            {"betas": (0.9, 1.0)},
            r"betas is \(0.9, 1.0\), but must be two numbers, at least 0",
        ),
        (Adam, {"betas": (0.9,)}, r"betas is \(0.9,\)"),
        (Adam, {"betas": 0.9}, r"betas is 0.9"),
        (Adam, {"eps": -1.0}, "Adam: eps is -1.0"),
        (Adam, {"step_mode": "slot"}, "step_mode is 'slot', but must be 'global' or 'row'"),
        (AdamW, {"weight_decay": -0.1}, NUMBER),
        (RowWiseAdam, {"weight_decay_mode": None}, "weight_decay_mode is None"),
        (LAMB, {"weight_decay": math.inf}, NUMBER),
        (FTRL, {"l1": -1.0}, "FTRL: l1 is -1.0"),
        (FTRL, {"beta": -1.0}, NUMBER),
        (FTRL, {"l2": "1"}, NUMBER),
        (FTRL, {"initial_accumulator": math.nan}, NUMBER),
        (SGD, {"clip_value": 0.0}, "clip_value is 0.0, but must be None or a positive number"),
        (LAMB, {"clip_norm": math.inf}, "clip_norm is inf"),
        (Adam, {"clip_output": -1}, "clip_output is -1"),
        (Adam, {"stochastic_rounding": "yes"}, "stochastic_rounding is 'yes'"),
        (Adam, {"rounding_seed": 2**63}, r"must be an integer from -2\^63 to 2\^63 - 1"),
        (Adam, {"rounding_seed": 0.5}, "rounding_seed is 0.5"),
    ],
)
def test_refused(kind, arguments, match):
    with pytest.raises(ValueError, match=match):
        kind(**arguments)


@pytest.mark.parametrize("optimizer", ["sgd", SGD, 3])
def test_a_group_takes_optimizers_only(optimizer):
    with pytest.raises(ValueError, match="but must be None or one of torchrec_hkv"):
        TableGroup([TableSpec("t", 10, 4)], [0], optimizer)


def test_states_too_narrow_for_the_optimizer():
    spec = TableSpec("t", 10, 4)
    with pytest.raises(ValueError, match="state_dim is 7, but must be from 8 to 8192"):
        TableGroup([spec], [0], Adam(), state_dim=7)
    assert TableGroup([spec], [0], Adam(), state_dim=9).export_table(0).states.shape == (10, 9)


@pytest.mark.parametrize(
    ("optimizer", "widths"),
    [
        (SGD(), (0, 0)),
        (SGD(0.9), (8, 7)),
        (Adagrad(), (8, 7)),
        (RowWiseAdagrad(), (1, 1)),
        (Adam(), (16, 14)),
        (Adam(step_mode="row"), (20, 15)),
        (RowWiseAdam(), (12, 8)),
        (RowWiseAdam(step_mode="row"), (12, 9)),
        (LAMB(), (16, 14)),
        (FTRL(), (16, 14)),
    ],
)
def test_state_widths(optimizer, widths):
    assert (optimizer.state_width(8), optimizer.state_width(7)) == widths
