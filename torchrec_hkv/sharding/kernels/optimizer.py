"""Converts optimizers that were applied in backward to the form that backends take.

Parameters that FBGEMM supports have FBGEMM's meaning. Parameters that FBGEMM ignores (momentum and
weight decay of SGD, weight decay of Adagrad) have the meaning of ``torch.optim``. In particular,
the weight decay of Adam is decoupled for ``torch.optim.Adam`` and ``AdamW``, unless
``weight_decay_mode`` says otherwise.

Without an optimizer a table is trained like a stock table, with FBGEMM's default: plain SGD at a
learning rate of 0.01.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torchrec_hkv.backends.protocol import OptimizerSpec


@functools.cache
def _fbgemm_defaults() -> dict[str, Any]:
    """The arguments of FBGEMM's tables with defaults, which stock tables use."""
    parameters = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


_NAMES: dict[EmbOptimType | str, str] = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "rowwise_adam",
    EmbOptimType.LAMB: "lamb",
    "ftrl": "ftrl",
}
_ALLOWED = (
    "SGD, Adagrad, Adam and AdamW of torch.optim, SGD, Adagrad, RowWiseAdagrad, Adam, "
    "PartialRowWiseAdam and LAMB of torchrec.optim, and optimizer='ftrl'"
)

# For each optimizer, its names of fused parameters and the attributes of a spec that they set.
_FOR_ALL = {
    "clip_value": "clip_value",
    "clip_norm": "clip_norm",
    "stochastic_rounding": "stochastic_rounding",
    "rounding_seed": "rounding_seed",
}
_DECAY = {"weight_decay": "weight_decay"}
_SUMS = {"eps": "eps", "initial_accumulator_value": "initial_accumulator"}
_MOMENTS = {"eps": "eps", "beta1": "beta1", "beta2": "beta2", "step_mode": "step_mode"}
_ATTRIBUTES: dict[str, dict[str, str]] = {
    "sgd": {"momentum": "momentum", "nesterov": "nesterov", **_DECAY},
    "adagrad": {**_SUMS, **_DECAY},
    "rowwise_adagrad": {**_SUMS, **_DECAY},
    "adam": {**_MOMENTS, **_DECAY},
    "rowwise_adam": {**_MOMENTS, **_DECAY},
    "lamb": {**_MOMENTS, **_DECAY},
    "ftrl": {
        "beta": "beta",
        "l1": "l1",
        "l2": "l2",
        "initial_accumulator_value": "initial_accumulator",
    },
}
# Parameters that are not simply copied to an attribute.
_TRANSLATED = ("gradient_clipping", "max_gradient")
#: A parameter that FBGEMM supports for row-wise Adagrad only.
_MAX_NORM = "max_norm"
_TRANSLATED_BY_NAME: dict[str, tuple[str, ...]] = {
    "sgd": ("weight_decay_mode",),
    "adagrad": ("weight_decay_mode",),
    "rowwise_adagrad": ("weight_decay_mode", _MAX_NORM),
    "adam": ("weight_decay_mode", "betas", "extra_optimizer_config"),
    "rowwise_adam": ("weight_decay_mode", "betas", "extra_optimizer_config"),
    "lamb": ("betas", "extra_optimizer_config"),
    "ftrl": (),
}
#: TensorFlow's default, because TorchRec has no FTRL.
_FTRL_INITIAL_ACCUMULATOR = 0.1

# Fused parameters about the storage of stock tables. They do not affect training, so tables on
# backends ignore them.
_ABOUT_STOCK_STORAGE: frozenset[str] = frozenset(
    {
        "bounds_check_mode",
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "cache_sets",
        "enforce_hbm",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "use_one_tbe_per_table",
    }
)


def optimizer_spec(table: str, fused_params: Mapping[str, Any]) -> OptimizerSpec:
    """The optimizer in a table's fused parameters; FBGEMM's default SGD if they name none.

    Args:
        table: name of the table, for the message.
        fused_params: parameters with FBGEMM's names: ``optimizer`` (an ``EmbOptimType``),
            ``learning_rate``, ``eps`` and others, and names of ``torch.optim`` that FBGEMM lacks.

    Raises:
        ValueError: the optimizer is not supported, or a parameter would be ignored.
    """
    is_named = "optimizer" in fused_params
    optimizer = fused_params["optimizer"] if is_named else _fbgemm_defaults()["optimizer"]
    if optimizer not in _NAMES:
        raise ValueError(
            f"Table {table!r} can't be trained with {optimizer}: allowed are {_ALLOWED}."
        )
    name = _NAMES[optimizer]
    # If no optimizer is named, momentum and weight decay are refused, because a stock table would
    # ignore them but torch.optim.SGD would not.
    attributes = {**_FOR_ALL, **(_ATTRIBUTES[name] if is_named else {})}
    allowed = {*attributes, *_TRANSLATED, *(_TRANSLATED_BY_NAME[name] if is_named else ())}
    described = name if is_named else f"no optimizer named, which means {name},"
    _refuse_others(table, described, fused_params, frozenset(allowed))
    spec_arguments: dict[str, Any] = {"name": name}
    if name == "ftrl":
        spec_arguments["initial_accumulator"] = _FTRL_INITIAL_ACCUMULATOR
    for key, attribute in attributes.items():
        if fused_params.get(key) is not None:
            spec_arguments[attribute] = fused_params[key]
    if (betas := fused_params.get("betas")) is not None:
        spec_arguments["beta1"], spec_arguments["beta2"] = betas
    spec_arguments.update(_step_mode(table, fused_params))
    spec_arguments.update(_clip_output(table, fused_params))
    spec_arguments.update(_decay_mode(table, name, fused_params))
    if _MAX_NORM in allowed:
        spec_arguments["max_norm"] = (
            fused_params.get(_MAX_NORM) or None
        )  # FBGEMM's 0 means no bound
    return OptimizerSpec(**spec_arguments)


def _refuse(table: str, what: str, allowed: str) -> ValueError:
    return ValueError(f"Table {table!r} can't be trained with {what}: {allowed}.")


def _refuse_others(
    table: str, optimizer: str, fused_params: Mapping[str, Any], supported: frozenset[str]
) -> None:
    defaults = _fbgemm_defaults()
    for name, value in fused_params.items():
        # output_dtype is handled in output_dtype.py.
        if name in ("optimizer", "learning_rate", "output_dtype") or name in supported:
            continue
        if name in _ABOUT_STOCK_STORAGE:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and name in defaults and value == defaults[name]:
            continue
        if is_tensor or value not in (None, False, 0):
            allowed = ", ".join(["learning_rate (lr)", *sorted(supported)])
            reason = f"with {optimizer} allowed are {allowed}"
            if name == _MAX_NORM:
                reason = "only row-wise Adagrad has max_norm; " + reason
            raise _refuse(table, f"{name}={value}", reason)


def _step_mode(table: str, fused_params: Mapping[str, Any]) -> dict[str, Any]:
    extra = fused_params.get("extra_optimizer_config")
    if extra is None:
        return {}
    switched_on = [field.name for field in dataclasses.fields(extra) if getattr(extra, field.name)]
    others = [name for name in switched_on if name != "use_rowwise_bias_correction"]
    if others:
        raise _refuse(
            table,
            f"extra_optimizer_config.{others[0]}",
            "of that config allowed is use_rowwise_bias_correction",
        )
    return {"step_mode": "row"} if switched_on else {}


def _clip_output(table: str, fused_params: Mapping[str, Any]) -> dict[str, Any]:
    bound = fused_params.get("max_gradient")
    if not fused_params.get("gradient_clipping"):
        if bound is not None:
            raise _refuse(
                table, f"max_gradient={bound}", "it only has an effect with gradient_clipping=True"
            )
        return {}
    return {"clip_output": _fbgemm_defaults()["max_gradient"] if bound is None else bound}


def _decay_mode(table: str, optimizer: str, fused_params: Mapping[str, Any]) -> dict[str, Any]:
    """The mode of weight decay; by default FBGEMM's, or PyTorch's where FBGEMM has none."""
    decay = fused_params.get("weight_decay") or 0.0
    mode = getattr(fused_params.get("weight_decay_mode"), "name", None)
    if fused_params.get("weight_decay_mode") is not None and mode not in ("NONE", "L2", "DECOUPLE"):
        raise _refuse(
            table,
            f"weight_decay_mode={fused_params['weight_decay_mode']}",
            "allowed are WeightDecayMode.L2 and WeightDecayMode.DECOUPLE",
        )
    if not decay or optimizer in ("lamb", "ftrl"):
        return {}
    if mode in ("L2", "DECOUPLE"):
        return {"weight_decay_mode": "coupled" if mode == "L2" else "decoupled"}
    if mode == "NONE" or optimizer == "rowwise_adagrad":
        raise _refuse(
            table,
            f"weight_decay={decay}",
            "FBGEMM would ignore it unless weight_decay_mode is WeightDecayMode.L2 or "
            "WeightDecayMode.DECOUPLE",
        )
    return {"weight_decay_mode": "decoupled" if "adam" in optimizer else "coupled"}


# For each optimizer class that TorchRec's sharding does not know: an equivalent class that it
# knows, and the defaults to use with that class.
_UNKNOWN_TO_TORCHREC: dict[
    type[torch.optim.Optimizer], tuple[type[torch.optim.Optimizer], dict[str, Any]]
] = {
    torch.optim.AdamW: (torch.optim.Adam, {"weight_decay": 0.01}),
}


def name_optimizer(parameter: torch.Tensor) -> None:
    """Replaces an optimizer class that TorchRec does not know by an equivalent one.

    TorchRec looks up the optimizer by its class when it shards, and fails on unknown classes.

    Args:
        parameter: the unsharded weight, after ``apply_optimizer_in_backward``.
    """
    classes: list[type[torch.optim.Optimizer]] = getattr(parameter, "_optimizer_classes", [])
    if len(classes) == 1 and classes[0] in _UNKNOWN_TO_TORCHREC:
        optimizer_class, defaults = _UNKNOWN_TO_TORCHREC[classes[0]]
        # Copied, because all parameters of one call share their classes and arguments.
        parameter._optimizer_kwargs = [{**defaults, **parameter._optimizer_kwargs[0]}]
        parameter._optimizer_classes = [optimizer_class]


def applied_optimizer(
    table: str, parameter: torch.Tensor, sharder_fused_params: Mapping[str, Any] | None
) -> OptimizerSpec:
    """The optimizer of a table, before TorchRec has merged its fused parameters.

    Args:
        table: name of the table, for the message.
        parameter: the unsharded weight, after ``apply_optimizer_in_backward``.
        sharder_fused_params: fused parameters of the sharder. An optimizer applied to the parameter
            takes precedence.

    Raises:
        ValueError: as in :func:`optimizer_spec`, or several optimizers were applied.
    """
    classes: list[type[torch.optim.Optimizer]] = getattr(parameter, "_optimizer_classes", [])
    kwargs: list[dict[str, Any]] = getattr(parameter, "_optimizer_kwargs", [])
    if len(classes) > 1:
        raise ValueError(
            f"Table {table!r} has {len(classes)} optimizers applied in backward: apply only one."
        )
    merged = dict(sharder_fused_params or {})
    if classes:
        optimizer_class, defaults = _UNKNOWN_TO_TORCHREC.get(classes[0], (classes[0], {}))
        merged.update({**defaults, **kwargs[0]})
        if "lr" in merged:
            merged["learning_rate"] = merged.pop("lr")
        if "optimizer" not in kwargs[0]:
            try:
                merged["optimizer"] = optimizer_type_to_emb_opt_type(optimizer_class)
            except ValueError:
                raise ValueError(
                    f"Table {table!r} can't be trained with {classes[0].__name__}: "
                    f"allowed are {_ALLOWED}."
                ) from None
    return optimizer_spec(table, merged)


def initial_learning_rate(fused_params: Mapping[str, Any]) -> float:
    """The learning rate in a group's fused parameters."""
    return float(fused_params.get("learning_rate", _fbgemm_defaults()["learning_rate"]))


#: Optimizers of FBGEMM's kernels for CPUs.
_ON_CPUS = ("sgd", "adagrad", "rowwise_adagrad")


def check_fused_optimizer(
    table: str,
    parameter: torch.Tensor,
    sharder_fused_params: Mapping[str, Any] | None,
    device_type: str,
) -> None:
    """Checks that FBGEMM's kernels can train a table with its optimizer, as far as this package
    knows the optimizer. The arguments are those of :func:`applied_optimizer`, and the device.

    Raises:
        ValueError: they can't.
    """
    try:
        name = applied_optimizer(table, parameter, sharder_fused_params).name
    except ValueError:  # TorchRec knows other optimizers
        return
    if name == "ftrl" or (device_type == "cpu" and name not in _ON_CPUS):
        where = " on a CPU" if name != "ftrl" else ""
        raise ValueError(f"table {table!r}: stock tables lack the optimizer {name}{where}.")
    of_parameter: list[dict[str, Any]] = getattr(parameter, "_optimizer_kwargs", [])
    all_params = {**(sharder_fused_params or {}), **(of_parameter[0] if of_parameter else {})}
    allowed = {**_FOR_ALL, **_ATTRIBUTES[name]}
    for argument in all_params:
        if argument in allowed and argument not in _fbgemm_defaults():
            raise ValueError(f"table {table!r}: stock tables lack the argument {argument}.")
