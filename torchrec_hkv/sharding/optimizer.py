"""Fused optimizers: what was applied in backward, and the object that holds the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.fused import FusedOptimizer

from torchrec_hkv.backends.protocol import OptimizerSpec

_ALLOWED = "torch.optim.SGD, torchrec.optim.SGD and torchrec.optim.RowWiseAdagrad, with lr and eps"

#: FBGEMM's default, which stock tables get when no learning rate is given.
_DEFAULT_LEARNING_RATE = 0.01

_NAMES: dict[EmbOptimType, str] = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
}

# Parameters of a sharder that say how stock tables are stored or fetched, not how rows are trained.
# A sharder may hold them for its stock tables while ours have no use for them.
_ABOUT_STOCK_STORAGE: frozenset[str] = frozenset(
    {
        "bounds_check_mode",
        "enforce_hbm",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "use_one_tbe_per_table",
    }
)


def optimizer_spec(table: str, fused_params: Mapping[str, Any]) -> OptimizerSpec | None:
    """The optimizer in a table's fused parameters.

    Args:
        table: its name, for the message.
        fused_params: FBGEMM's terms: ``optimizer`` (an ``EmbOptimType``), ``learning_rate``,
            ``eps``, and others.

    Returns:
        None when no optimizer was applied.

    Raises:
        ValueError: another optimizer, or an argument that would be ignored.
    """
    optimizer = fused_params.get("optimizer")
    for name, value in fused_params.items():
        if name in ("optimizer", "learning_rate", "eps"):
            continue
        if name in _ABOUT_STOCK_STORAGE or name.startswith("cache_") or value is SparseType.FP32:
            continue
        if isinstance(value, torch.Tensor) or value not in (None, False, 0):
            raise ValueError(
                f"Table {table!r} can't be trained with {name}={value}: allowed are {_ALLOWED}."
            )
    if optimizer is None:
        return None
    if optimizer not in _NAMES:
        raise ValueError(
            f"Table {table!r} can't be trained with {optimizer}: allowed are {_ALLOWED}."
        )
    return OptimizerSpec(name=_NAMES[optimizer], eps=float(fused_params.get("eps", 1e-8)))


def applied_optimizer(
    table: str, parameter: torch.Tensor, sharder_fused_params: Mapping[str, Any] | None
) -> OptimizerSpec | None:
    """The optimizer that a table will get, before TorchRec has merged its fused parameters.

    Args:
        table: its name, for the message.
        parameter: the unsharded weight, as ``apply_optimizer_in_backward`` left it.
        sharder_fused_params: those of its sharder; what was applied to the parameter wins.

    Raises:
        ValueError: as :func:`optimizer_spec`; or more than one optimizer was applied.
    """
    classes: list[type[torch.optim.Optimizer]] = getattr(parameter, "_optimizer_classes", [])
    kwargs: list[dict[str, Any]] = getattr(parameter, "_optimizer_kwargs", [])
    if len(classes) > 1:
        raise ValueError(
            f"Table {table!r} has {len(classes)} optimizers applied in backward: allowed is one."
        )
    merged = dict(sharder_fused_params or {})
    if classes:
        merged.update(kwargs[0])
        if "lr" in merged:
            merged["learning_rate"] = merged.pop("lr")
        if "optimizer" not in kwargs[0]:
            try:
                merged["optimizer"] = optimizer_type_to_emb_opt_type(classes[0])
            except ValueError:
                raise ValueError(
                    f"Table {table!r} can't be trained with {classes[0].__name__}: "
                    f"allowed are {_ALLOWED}."
                ) from None
    return optimizer_spec(table, merged)


def initial_learning_rate(fused_params: Mapping[str, Any]) -> float:
    """The learning rate in a group's fused parameters."""
    return float(fused_params.get("learning_rate", _DEFAULT_LEARNING_RATE))


class RowOptimizer(FusedOptimizer):
    """What TorchRec and LR schedulers see of an optimizer that runs in the backward of a lookup.

    The state of a row lives with the row, not here: a KeyedOptimizer refuses to load a state
    where there was none, and rows come and go.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], learning_rate: float) -> None:
        """
        Args:
            parameters: by ``"{table}.weight"``, the parameters that stand for the tables.
            learning_rate: of the first step.
        """
        group = {"params": list(parameters.values()), "lr": learning_rate}
        super().__init__(parameters, {}, [group])

    @property
    def learning_rate(self) -> float:
        """The learning rate now. LR schedulers change it in the parameter group."""
        return float(self.param_groups[0]["lr"])

    def step(self, closure: Any = None) -> None:
        """Nothing to do: rows are updated in the backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing to do: rows have no gradients."""
