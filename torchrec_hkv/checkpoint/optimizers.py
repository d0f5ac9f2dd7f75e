"""The state of TorchRec's optimizers as :mod:`torch.distributed.checkpoint` can have it."""

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
    """Refuses optimizers whose states have no names.

    Raises:
        ValueError: it is none of TorchRec's.
    """
    if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
        raise ValueError(
            f"The optimizer is a {type(optimizer).__name__}: it must be a KeyedOptimizer of "
            "TorchRec's, such as KeyedOptimizerWrapper or CombinedOptimizer."
        )


def optimizer_state(optimizer: KeyedOptimizer) -> dict[str, Any]:
    """What there is to save or to load into, under ``"optimizer"``; nothing on a rank without any.

    Parameters without a state, such as tables that SGD trains, are left out. They are not written,
    but where a rank lacks some tensor of a checkpoint, ``torch.distributed.checkpoint`` reads its
    own as in older formats, in which an empty mapping is an entry, and misses that.
    """
    state = _without_empty(optimizer.state_dict())
    return {"optimizer": state} if state else {}


def load_optimizer_state(optimizer: KeyedOptimizer, state: Mapping[str, Any]) -> None:
    """Takes what :func:`optimizer_state` gave under ``"optimizer"``."""
    optimizer.load_state_dict(_completed(state, optimizer.state_dict()))


def initialise(optimizer: KeyedOptimizer, saved: set[str]) -> Callable[[], None]:
    """Makes the lazy states of dense optimizers, which TorchRec loads in place.

    Args:
        optimizer: of any of TorchRec's kinds.
        saved: paths of the tensors that will be loaded. What has no state there stays without one:
            it was saved before its first step.

    Returns:
        What takes the states away again.
    """
    made: list[KeyedOptimizerWrapper] = []

    def undo() -> None:
        for leaf in made:
            leaf.state.clear()

    for prefix, leaf in leaves(optimizer):
        if not isinstance(leaf, KeyedOptimizerWrapper) or leaf.state:
            continue
        paths = [f"optimizer.state.{_joined(prefix, name)}." for name in leaf.params]
        if not any(key.startswith(path) for path in paths for key in saved):
            continue
        made.append(leaf)
        before = [parameter.detach().clone() for parameter in leaf.params.values()]
        leaf.init_state()  # a step on zero gradients, in which weight decay would count
        leaf.zero_grad()
        for parameter, value in zip(leaf.params.values(), before, strict=True):
            parameter.detach().copy_(value)
    return undo


def leaves(optimizer: KeyedOptimizer, prefix: str = "") -> Iterator[tuple[str, KeyedOptimizer]]:
    """The optimizers that one is made of, with what stands before the names of their parameters."""
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
    """What was loaded, with the empty mappings of the whole."""
    return {
        key: _completed(loaded.get(key, {}), value) if isinstance(value, Mapping) else loaded[key]
        for key, value in whole.items()
    }
