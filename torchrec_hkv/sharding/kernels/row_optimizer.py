"""The object that holds the learning rate of tables whose rows are trained in the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer


class RowOptimizer(FusedOptimizer):
    """What TorchRec and LR schedulers see of an optimizer that runs in the backward of a lookup.

    The state of a row lives with the row, not here: a KeyedOptimizer refuses to load a state
    where there was none, and rows come and go. Where all rows are there and lie open by number,
    their states are shown here as TorchRec shows those of its tables.
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
            parameters: by ``"{table}.weight"``, the parameters that stand for the tables.
            learning_rate: of the first step.
            device: of the tables, the CPU when None.
            states: of tables whose rows lie open by number, by parameter.
            refresh: brings those up to date.
        """
        self._refresh = refresh
        self._on_device = torch.tensor(learning_rate, dtype=torch.float32, device=device)
        self._value = float(learning_rate)
        group = {"params": list(parameters.values()), "lr": learning_rate}
        super().__init__(parameters, dict(states or {}), [group])

    @property
    def learning_rate(self) -> torch.Tensor:
        """The learning rate of ``param_groups[0]["lr"]``, float32 ``[]`` on the device.

        Always the same tensor, so that a CUDA graph sees its changes. It follows the parameter
        group, a number or a tensor, when it is asked for and in :meth:`step` and :meth:`zero_grad`;
        the host does not wait for a device.
        """
        given = self.param_groups[0]["lr"]
        if isinstance(given, torch.Tensor) and given.device.type != "cpu":
            self._on_device.copy_(given.detach(), non_blocking=True)
            self._value = float("nan")  # not known here
        elif (value := float(given)) != self._value:
            self._on_device.fill_(value)
            self._value = value
        return self._on_device

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """TorchRec's: the states of tables whose rows lie open by number, up to date."""
        if self._refresh is not None:
            self._refresh()
        return self._state

    @state.setter
    def state(self, state: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        self._state = state

    def step(self, closure: Any = None) -> None:
        """Rows are updated in the backward; the learning rate of the next step is set."""
        _ = self.learning_rate

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Rows have no gradients; the learning rate of the next step is set."""
        _ = self.learning_rate
