"""Converts the state of TorchRec's optimizers for :mod:`torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)


def check_optimizer(optimizer: KeyedOptimizer | None) -> None:
    """Checks that the states of an optimizer have names.

    Raises:
        ValueError: it is not a ``KeyedOptimizer``.
    """
    if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
        raise ValueError(
            f"The optimizer is a {type(optimizer).__name__}: it must be a KeyedOptimizer of "
            "TorchRec's, such as KeyedOptimizerWrapper or CombinedOptimizer."
        )


def optimizer_state(optimizer: KeyedOptimizer) -> dict[str, Any]:
    """The state to save or to load into, under the key ``"optimizer"``; empty on a rank without
    state.

    Parameters without state, such as tables trained by SGD, are left out. They are never written,
    but on a rank that lacks a tensor of the checkpoint, ``torch.distributed.checkpoint`` reads as
    in older formats, where an empty mapping is an entry, and would miss that entry.
    """
    state = _without_empty(optimizer.state_dict())
    return {"optimizer": state} if state else {}


def load_optimizer_state(optimizer: KeyedOptimizer, state: Mapping[str, Any]) -> None:
    """Loads what :func:`optimizer_state` returned under ``"optimizer"``."""
    optimizer.load_state_dict(_completed(state, optimizer.state_dict()))


def initialise(optimizer: KeyedOptimizer, saved: set[str]) -> Callable[[], None]:
    """Creates the states of dense optimizers that have not run a step yet. TorchRec loads states in
    place, so they must exist.

    Args:
        optimizer: any ``KeyedOptimizer``.
        saved: paths of the tensors that will be loaded. An optimizer without tensors among them
            stays without state, because it was saved before its first step.

    Returns:
        A function that removes the created states again.
    """
    initialised: list[KeyedOptimizerWrapper] = []

    def undo() -> None:
        for leaf in initialised:
            leaf.state.clear()

    for prefix, leaf in leaves(optimizer):
        if not isinstance(leaf, KeyedOptimizerWrapper) or leaf.state:
            continue
        paths = [f"optimizer.state.{_joined(prefix, name)}." for name in leaf.params]
        if not any(key.startswith(path) for path in paths for key in saved):
            continue
        initialised.append(leaf)
        before = [parameter.detach().clone() for parameter in leaf.params.values()]
        leaf.init_state()  # a step on zero gradients, in which weight decay would count
        leaf.zero_grad()
        for parameter, value in zip(leaf.params.values(), before, strict=True):
            parameter.detach().copy_(value)
    return undo


def leaves(optimizer: KeyedOptimizer, prefix: str = "") -> Iterator[tuple[str, KeyedOptimizer]]:
    """The optimizers inside an optimizer, each with the prefix of its parameter names."""
    if isinstance(optimizer, CombinedOptimizer):
        for name, part in optimizer.optimizers:
            yield from leaves(part, _joined(prefix, name))
    elif isinstance(optimizer, OptimizerWrapper):
        yield from leaves(optimizer._optimizer, prefix)
    else:
        yield prefix, optimizer


def _joined(prefix: str, name: str) -> str:
    return CombinedOptimizer.prepend_opt_key(name, prefix)


def _without_empty(state: Mapping[str, Any]) -> dict[str, Any]:
    parts = {k: _without_empty(v) if isinstance(v, Mapping) else v for k, v in state.items()}
    return {k: v for k, v in parts.items() if not (isinstance(v, Mapping) and not v)}


def _completed(loaded: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """The loaded state, completed by the empty mappings of the whole state."""
    return {
        key: _completed(loaded.get(key, {}), value) if isinstance(value, Mapping) else loaded[key]
        for key, value in whole.items()
    }
