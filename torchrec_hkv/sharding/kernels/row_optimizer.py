"""The optimizer object of tables whose rows are updated in the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer


class InBackwardOptimizer(FusedOptimizer):
    """Represents the optimizer of a lookup's backward to TorchRec and to LR schedulers.

    Optimizer states are stored with the rows, not here: a KeyedOptimizer refuses to load a state
    that it does not already have, but rows are inserted and evicted. Only the states of
    dense-compatible tables, which always hold all rows, are exposed here as in TorchRec.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        learning_rate: float,
        device: torch.device | None = None,
        states: Mapping[nn.Parameter, dict[str, Any]] | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            parameters: the placeholders of the tables by ``"{table}.weight"``.
            learning_rate: initial learning rate.
            device: device of the tables; None for the CPU.
            states: optimizer states of dense-compatible tables, by placeholder.
            refresh: updates these states from the tables.
        """
        self._refresh = refresh
        self._on_device = torch.tensor(learning_rate, dtype=torch.float32, device=device)
        self._value = float(learning_rate)
        group = {"params": list(parameters.values()), "lr": learning_rate}
        super().__init__(parameters, dict(states or {}), [group])

    @property
    def learning_rate(self) -> torch.Tensor:
        """The learning rate of ``param_groups[0]["lr"]``, float32 ``[]`` on the device.

        It is always the same tensor, so that CUDA graphs see changes. It is updated from the
        parameter group, a number or a tensor, when this property is read and in :meth:`step` and
        :meth:`zero_grad`. Does not synchronize with the device.
        """
        group_rate = self.param_groups[0]["lr"]
        if isinstance(group_rate, torch.Tensor) and group_rate.device.type != "cpu":
            self._on_device.copy_(group_rate.detach(), non_blocking=True)
            self._value = float("nan")  # unknown on the host
        elif (value := float(group_rate)) != self._value:
            self._on_device.fill_(value)
            self._value = value
        return self._on_device

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """The current optimizer states of dense-compatible tables."""
        if self._refresh is not None:
            self._refresh()
        return self._state

    @state.setter
    def state(self, state: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        self._state = state

    def step(self, closure: Any = None) -> None:
        """Updates the learning rate tensor. Rows are updated in the backward."""
        _ = self.learning_rate

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Updates the learning rate tensor. Rows have no gradients."""
        _ = self.learning_rate
