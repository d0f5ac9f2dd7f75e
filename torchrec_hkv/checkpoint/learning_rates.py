"""Saves and restores the learning rates of an optimizer.

The ``state_dict`` of TorchRec's optimizers has no learning rates, but most schedulers continue from
the rate in the parameter groups. Rates are saved by parameter name, because groups depend on the
rank and on the sharding, and names don't.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_hkv.checkpoint.learning_rate_schema import RATES, SCHEDULED
from torchrec_hkv.checkpoint.optimizers import leaves
from torchrec_hkv.json_schema import JsonPlace


def learning_rates(optimizer: KeyedOptimizer) -> dict[str, dict[str, Any]]:
    """The values that schedulers change (numbers and lists of numbers), by parameter name.

    Raises:
        ValueError: a value is not a finite number and can't be saved.
    """
    return {
        name: RATES.read(
            {key: _plain(group[key]) for key in SCHEDULED if key in group},
            JsonPlace("The optimizer", f"parameter {name!r}"),
        )
        for group, names in _groups(optimizer)
        for name in names
    }


def check_learning_rates(
    optimizer: KeyedOptimizer, saved: Mapping[str, Mapping[str, Any]], file: Path
) -> None:
    """Checks that :func:`put_learning_rates` can put the values into an optimizer.

    Args:
        optimizer: the optimizer to load into.
        saved: the learning rates of a checkpoint.
        file: the file that they were read from.

    Raises:
        ValueError: it can't; the message names the file, the parameter, the value and what is
            allowed.
    """
    for group, names in _groups(optimizer):
        name = next((name for name in names if name in saved), None)
        for key, value in {} if name is None else saved[name].items():
            current = _plain(group.get(key))
            place = JsonPlace(str(file)).of("learning_rates").of(name).of(key)
            if isinstance(current, list) and not (
                isinstance(value, list) and len(value) == len(current)
            ):
                raise place.refuse(value, f"a list of {len(current)} numbers, as the optimizer has")
            if isinstance(current, (int, float)) and not isinstance(value, (int, float)):
                raise place.refuse(value, "a number, as the optimizer has")


def put_learning_rates(optimizer: KeyedOptimizer, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts the values of :func:`learning_rates` into the groups of an optimizer. Groups whose
    parameters have no saved value stay unchanged."""
    for group, names in _groups(optimizer):
        saved_group = next((saved[name] for name in names if name in saved), {})
        for key, value in saved_group.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    for _, leaf in leaves(optimizer):
        if isinstance(leaf, FusedOptimizer):
            leaf.zero_grad()  # passes the rate to the kernel, which trains in the next backward


def _groups(optimizer: KeyedOptimizer) -> Iterator[tuple[dict[str, Any], list[str]]]:
    names = {parameter: name for name, parameter in optimizer.params.items()}
    for group in optimizer.param_groups:
        yield group, [names[parameter] for parameter in group["params"]]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, torch.Tensor) else value
