"""Fused optimizers: how TorchRec specifies them, and what backends get."""

from __future__ import annotations

import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    UserEnabledConfigDefinition,
    WeightDecayMode,
)
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_hkv.backends import OptimizerSpec
from torchrec_hkv.sharding.kernels.optimizer import (
    applied_optimizer,
    initial_learning_rate,
    optimizer_spec,
)


def _applied(optimizer, kwargs, fused_params=None):
    parameter = nn.Parameter(torch.empty(2, 2, device="meta"))
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, [parameter], kwargs)
    return applied_optimizer("t", parameter, fused_params)


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "spec"),
    [
        (None, {}, OptimizerSpec("sgd")),
        (torch.optim.SGD, {"lr": 0.1}, OptimizerSpec("sgd")),
        (torchrec.optim.SGD, {"lr": 0.1, "momentum": 0}, OptimizerSpec("sgd")),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.0}, OptimizerSpec("sgd")),
        (torch.optim.SGD, {"lr": 0.1, "dampening": 0, "maximize": False}, OptimizerSpec("sgd")),
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            OptimizerSpec("sgd", momentum=0.9, nesterov=True, weight_decay=0.1),
        ),
        (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}, OptimizerSpec("adagrad", 1e-3)),
        (
            torchrec.optim.Adagrad,
            {"lr": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1, "lr_decay": 0},
            OptimizerSpec("adagrad", initial_accumulator=0.5, weight_decay=0.1),
        ),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}, OptimizerSpec("rowwise_adagrad", 1e-8)),
        (
            torchrec.optim.RowWiseAdagrad,
            {"lr": 0.1, "eps": 1e-3},
            OptimizerSpec("rowwise_adagrad", 1e-3),
        ),
        (
            torchrec.optim.RowWiseAdagrad,
            {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
            OptimizerSpec("rowwise_adagrad", weight_decay=0.1),
        ),
        (
            torchrec.optim.RowWiseAdagrad,
            {"max_norm": 0.5},
            OptimizerSpec("rowwise_adagrad", max_norm=0.5),
        ),
        (torchrec.optim.RowWiseAdagrad, {"max_norm": 0.0}, OptimizerSpec("rowwise_adagrad")),
        (
            torchrec.optim.RowWiseAdagrad,
            {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE},
            OptimizerSpec("rowwise_adagrad", weight_decay=0.1, weight_decay_mode="decoupled"),
        ),
        (torch.optim.Adam, {"lr": 0.1}, OptimizerSpec("adam")),
        (
            torch.optim.Adam,
            {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1, "amsgrad": False},
            OptimizerSpec(
                "adam",
                1e-4,
                beta1=0.8,
                beta2=0.9,
                weight_decay=0.1,
                weight_decay_mode="decoupled",  # like FBGEMM's
            ),
        ),
        (
            torchrec.optim.Adam,
            {"beta1": 0.8, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
            OptimizerSpec("adam", beta1=0.8, weight_decay=0.1),
        ),
        (
            torch.optim.AdamW,
            {"lr": 0.1},
            OptimizerSpec("adam", weight_decay=0.01, weight_decay_mode="decoupled"),
        ),
        (
            torch.optim.AdamW,
            {"weight_decay": 0.2},
            OptimizerSpec("adam", weight_decay=0.2, weight_decay_mode="decoupled"),
        ),
        (
            torchrec.optim.Adam,
            {"extra_optimizer_config": UserEnabledConfigDefinition(True)},
            OptimizerSpec("adam", step_mode="row"),
        ),
        (
            torchrec.optim.PartialRowWiseAdam,
            {"beta2": 0.99, "step_mode": "row"},
            OptimizerSpec("rowwise_adam", beta2=0.99, step_mode="row"),
        ),
        (torchrec.optim.LAMB, {"weight_decay": 0.1}, OptimizerSpec("lamb", weight_decay=0.1)),
        (
            torchrec.optim.SGD,
            {"gradient_clipping": True},
            OptimizerSpec("sgd", clip_output=1.0),
        ),
        (
            torchrec.optim.SGD,
            {"gradient_clipping": True, "max_gradient": 0.5},
            OptimizerSpec("sgd", clip_output=0.5),
        ),
        (
            torchrec.optim.Adam,
            {"clip_value": 0.5, "clip_norm": 2.0, "stochastic_rounding": False, "rounding_seed": 3},
            OptimizerSpec(
                "adam", clip_value=0.5, clip_norm=2.0, stochastic_rounding=False, rounding_seed=3
            ),
        ),
        (
            torchrec.optim.SGD,
            {"optimizer": "ftrl", "l1": 0.1, "l2": 0.2, "beta": 1.0},
            OptimizerSpec("ftrl", l1=0.1, l2=0.2, beta=1.0, initial_accumulator=0.1),
        ),
    ],
)
def test_served(optimizer, kwargs, spec):
    assert _applied(optimizer, kwargs) == spec


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "message"),
    [
        (
            torch.optim.RMSprop,
            {"lr": 0.1},
            "with RMSprop: allowed are SGD, Adagrad, Adam and AdamW",
        ),
        (torchrec.optim.LarsSGD, {"lr": 0.1}, "with lars_sgd: allowed are"),
        (torchrec.optim.PartialRowWiseLAMB, {"lr": 0.1}, "with partial_row_wise_lamb: allowed are"),
        (
            torch.optim.SGD,
            {"lr": 0.1, "maximize": True},
            "maximize=True: with sgd allowed are learning_rate (lr), ",
        ),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
        (torchrec.optim.SGD, {"lr": 0.1, "eps": 0.1}, "eps=0.1: with sgd allowed are"),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, "lr_decay=0.1: with adagrad"),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, "amsgrad=True: with adam allowed are"),
        (
            torchrec.optim.RowWiseAdagrad,
            {"weight_decay": 0.1},
            "weight_decay=0.1: FBGEMM would ignore it unless weight_decay_mode is",
        ),
        (
            torchrec.optim.Adam,
            {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.NONE},
            "weight_decay=0.1: FBGEMM would ignore it unless weight_decay_mode is",
        ),
        (
            torchrec.optim.RowWiseAdagrad,
            {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.COUNTER},
            "allowed are WeightDecayMode.L2 and WeightDecayMode.DECOUPLE",
        ),
        (
            torchrec.optim.LAMB,
            {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
            "weight_decay_mode=1: with lamb allowed are",
        ),
        *(
            (optimizer, {"lr": 0.1, "max_norm": 1.0}, "max_norm=1.0: only row-wise Adagrad has")
            for optimizer in (torchrec.optim.SGD, torchrec.optim.Adagrad, torchrec.optim.Adam)
        ),
        (
            torchrec.optim.RowWiseAdagrad,
            {"lr": 0.1, "max_gradient": 1.0},
            "max_gradient=1.0: it only has an effect with gradient_clipping=True",
        ),
        (
            torchrec.optim.SGD,
            {"extra_optimizer_config": UserEnabledConfigDefinition(True)},
            "extra_optimizer_config=",
        ),
        (
            torchrec.optim.Adam,
            {
                "extra_optimizer_config": UserEnabledConfigDefinition(
                    use_rowwise_bias_correction=True, use_writeback_bwd_prehook=True
                )
            },
            "use_writeback_bwd_prehook: of that config allowed is use_rowwise_bias_correction",
        ),
    ],
)
def test_refused(optimizer, kwargs, message):
    with pytest.raises(ValueError, match=r"^Table 't' can't be trained with") as refusal:
        _applied(optimizer, kwargs)
    assert message in str(refusal.value)


@pytest.mark.parametrize("kind", list(EmbOptimType))
def test_every_type_of_fbgemm_is_served_or_refused(kind):
    served = {
        EmbOptimType.SGD,
        EmbOptimType.EXACT_SGD,
        EmbOptimType.EXACT_ADAGRAD,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.ADAM,
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        EmbOptimType.LAMB,
    }
    if kind in served:
        assert optimizer_spec("t", {"optimizer": kind, "learning_rate": 0.1}) is not None
    else:
        with pytest.raises(ValueError, match="can't be trained with"):
            optimizer_spec("t", {"optimizer": kind})


@pytest.mark.parametrize(
    ("fused_params", "spec"),
    [
        ({}, OptimizerSpec("sgd")),
        ({"learning_rate": 0.1}, OptimizerSpec("sgd")),
        ({"gradient_clipping": True}, OptimizerSpec("sgd", clip_output=1.0)),
        ({"stochastic_rounding": False}, OptimizerSpec("sgd", stochastic_rounding=False)),
        ({"clip_norm": 2.0}, OptimizerSpec("sgd", clip_norm=2.0)),
        # FBGEMM's default values specify nothing.
        ({"momentum": 0.9, "eps": 1e-8, "beta2": 0.999, "max_norm": 0.0}, OptimizerSpec("sgd")),
        ({"optimizer": EmbOptimType.ADAM}, OptimizerSpec("adam")),
    ],
)
def test_without_an_optimizer_fbgemms_defaults_hold(fused_params, spec):
    assert _applied(None, {}, fused_params) == spec


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("momentum", 0.5),
        ("weight_decay", 0.1),
        ("nesterov", True),
        ("eps", 1e-3),
        ("max_norm", 1.0),
        ("lr", 0.1),
    ],
)
def test_without_an_optimizer_what_sgd_would_ignore_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: .*no optimizer named, which means sgd"):
        _applied(None, {}, {name: value})


def test_no_optimizer_by_name_is_refused():
    with pytest.raises(ValueError, match="Table 't' can't be trained with None: allowed are"):
        optimizer_spec("t", {"optimizer": None})


#: Arguments of FBGEMM's tables that affect training, each with a value that is not the default.
TRAINING_ARGUMENTS = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "stochastic_rounding": False,
    "gradient_clipping": True,
    "max_gradient": 0.5,
    "max_norm": 0.5,
    "learning_rate": 0.1,
    "eps": 1e-3,
    "momentum": 0.5,
    "weight_decay": 0.1,
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "eta": 0.1,
    "beta1": 0.5,
    "beta2": 0.5,
    "ensemble_mode": object(),
    "emainplace_mode": object(),
    "counter_based_regularization": object(),
    "cowclip_regularization": object(),
    "optimizer_state_dtypes": {"momentum1": SparseType.FP16},
    "global_weight_decay": object(),
    "extra_optimizer_config": UserEnabledConfigDefinition(use_writeback_bwd_prehook=True),
}


#: Arguments that change what is trained, by optimizer. All others are refused.
HONOURED = {
    EmbOptimType.EXACT_SGD: {"momentum", "weight_decay"},
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: {"eps", "max_norm"},
    EmbOptimType.ADAM: {"eps", "beta1", "beta2", "weight_decay"},
}


@pytest.mark.parametrize("name", TRAINING_ARGUMENTS)
@pytest.mark.parametrize("optimizer", HONOURED)
def test_arguments_of_training_are_honoured_or_refused(optimizer, name):
    told = {"optimizer": optimizer, name: TRAINING_ARGUMENTS[name]}
    if name == "learning_rate":
        assert initial_learning_rate(told) == 0.1
    elif name in {"optimizer", "stochastic_rounding", "gradient_clipping", *HONOURED[optimizer]}:
        other = EmbOptimType.LAMB if name == "optimizer" else optimizer
        assert optimizer_spec("t", told) != optimizer_spec("t", {"optimizer": other})
    else:
        with pytest.raises(ValueError, match="Table 't' can't be trained with"):
            optimizer_spec("t", told)


def test_a_sharders_parameters_about_stock_storage_are_passed_over():
    stock = {
        "prefetch_pipeline": True,
        "cache_load_factor": 0.1,
        "output_dtype": SparseType.FP32,
    }
    assert _applied(torch.optim.SGD, {"lr": 0.1}, stock) == OptimizerSpec("sgd")


def test_two_optimizers_are_refused():
    parameter = nn.Parameter(torch.empty(2, 2, device="meta"))
    for _ in range(2):
        apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    with pytest.raises(ValueError, match="has 2 optimizers"):
        applied_optimizer("t", parameter, None)
