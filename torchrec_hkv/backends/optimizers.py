"""Makes the hash table's optimizer from an :class:`OptimizerSpec`."""

from __future__ import annotations

import functools

from torchrec_hkv.backends.protocol import OptimizerSpec
from torchrec_hkv.hash_table import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    RowWiseAdagrad,
    RowWiseAdam,
)
from torchrec_hkv.hash_table.files.state_columns import OWN_STEPS


@functools.lru_cache(256)
def hash_table_optimizer(spec: OptimizerSpec | None) -> Optimizer | None:
    """The hash table's optimizer for ``spec``; None for None.

    Raises:
        ValueError: the name is unknown, or an attribute has an invalid value.
    """
    if spec is None:
        return None
    common = {
        "clip_value": spec.clip_value,
        "clip_norm": spec.clip_norm,
        "clip_output": spec.clip_output,
        "stochastic_rounding": spec.stochastic_rounding,
        "rounding_seed": spec.rounding_seed,
    }
    decay = {"weight_decay": spec.weight_decay, "weight_decay_mode": spec.weight_decay_mode}
    moments = {
        "betas": (spec.beta1, spec.beta2),
        "eps": spec.eps,
        "step_mode": spec.step_mode,
    }
    sums = {"eps": spec.eps, "initial_accumulator": spec.initial_accumulator}
    match spec.name:
        case "sgd":
            return SGD(spec.momentum, spec.nesterov, **decay, **common)
        case "adagrad":
            return Adagrad(**sums, **decay, **common)
        case "rowwise_adagrad":
            return RowWiseAdagrad(**sums, **decay, **common, max_norm=spec.max_norm)
        case "adam":
            return Adam(**moments, **decay, **common)
        case "rowwise_adam":
            return RowWiseAdam(**moments, **decay, **common)
        case "lamb":
            return LAMB(**moments, weight_decay=spec.weight_decay, **common)
        case "ftrl":
            return FTRL(
                spec.beta,
                spec.l1,
                spec.l2,
                initial_accumulator=spec.initial_accumulator,
                **common,
            )
    raise ValueError(
        f"optimizer is {spec.name!r}, but backend 'hkv' takes 'sgd', 'adagrad', 'rowwise_adagrad', "
        "'adam', 'rowwise_adam', 'lamb' or 'ftrl'."
    )


@functools.lru_cache(1 << 12)
def state_width(spec: OptimizerSpec | None, dim: int) -> int:
    optimizer = hash_table_optimizer(spec)
    return 0 if optimizer is None else optimizer.state_width(dim)


def counts_own_steps(spec: OptimizerSpec | None) -> bool:
    """Whether a row's state has the number of its updates."""
    return layout_of(spec) >= OWN_STEPS


def layout_of(spec: OptimizerSpec | None) -> int:
    """The number of an optimizer's state layout in files; 0 for None."""
    optimizer = hash_table_optimizer(spec)
    return 0 if optimizer is None else optimizer.config().layout


def optimizer_of_layout(layout: int) -> OptimizerSpec | None:
    """An optimizer whose states have this layout. A layout does not contain betas and other
    numbers, so they are the defaults.

    Raises:
        ValueError: no optimizer has this layout.
    """
    if layout == 0:
        return None
    names = ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "ftrl")
    specs = [OptimizerSpec(name) for name in names]
    specs += [OptimizerSpec(name, step_mode="row") for name in ("adam", "rowwise_adam", "lamb")]
    specs.append(OptimizerSpec("sgd", momentum=0.9))
    for spec in specs:
        if layout_of(spec) == layout:
            return spec
    raise ValueError(
        f"Optimizer states have layout {layout}, which this version does not know: load them with "
        "the version of torchrec_hkv that saved them."
    )
