"""Functions of Tensor-Train tables refuse bad arguments in one sentence."""

from __future__ import annotations

import math

import pytest
import torch

from torchrec_hkv.tensor_train import (
    IdOrder,
    TTGroup,
    TTShape,
    initial_cores,
    smoothed_means,
    tt_svd,
)

SHAPE = TTShape(30, 4, (6, 5), (2, 2), (3,))


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize("value", [True, "1", [1.0]])
def test_types_of_moments(name, value):
    with pytest.raises(TypeError, match=f"{name} is .*, but must be a number"):
        initial_cores(SHAPE, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        *(({"max_error": v}, TypeError, "max_error is .* must be a number") for v in (True, "1")),
        *(({"max_error": v}, ValueError, "max_error is") for v in (-1, math.nan, math.inf)),
        ({"ranks": 2.5}, TypeError, "ranks has 2.5"),
        ({"ranks": True}, TypeError, "ranks has True"),
        ({"ranks": 0}, ValueError, "ranks has 0"),
        ({"ranks": 2, "p": 30}, TypeError, "p is 30, but must be a sequence"),
        ({"ranks": 2, "q": "22"}, TypeError, "q is '22', but must be a sequence"),
        ({"ranks": 2, "num_cores": 5}, ValueError, "number of cores is 5"),
        ({"ranks": 2, "num_cores": True}, ValueError, "number of cores is True"),
    ],
)
def test_decompositions(arguments, error, match):
    with pytest.raises(error, match=match):
        tt_svd(torch.randn(30, 4), **arguments)


@pytest.mark.parametrize("value", [3, None, [1, 0], "10"])
def test_orders_of_what_is_no_tensor(value):
    with pytest.raises(TypeError, match="must be a tensor"):
        IdOrder(value)
    with pytest.raises(TypeError, match="must be a tensor"):
        IdOrder.by_value(value)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"ids": [0]}, TypeError, "ids are list, but must be a tensor"),
        ({"labels": 1.0}, TypeError, "labels are float, but must be a tensor"),
        *(({"num_ids": v}, TypeError, "num_ids is .* an integer") for v in (True, 2.5, "3")),
        *(({"prior": v}, TypeError, "prior is .* a number") for v in (True, "3", None)),
        *(({"prior": v}, ValueError, "prior is") for v in (-1, math.nan, math.inf)),
    ],
)
def test_means(arguments, error, match):
    with pytest.raises(error, match=match):
        smoothed_means(
            **{"ids": torch.tensor([0]), "labels": torch.ones(1), "num_ids": 3, **arguments}
        )


@pytest.mark.parametrize("names", ["page", [3], 3])
def test_names_of_a_group(names):
    with pytest.raises(TypeError, match=r"names are .* must be a sequence of str"):
        TTGroup([SHAPE], names=names)
