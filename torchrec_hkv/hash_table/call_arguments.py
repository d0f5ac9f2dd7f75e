"""Checks of what a call of a HashTable is given, before it gets its number: a refused call does not
count."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

#: Policies whose scores the table makes by itself.
_OWN_SCORES = ("lru", "epoch_lru")


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """What a table's calls take.

    Attributes:
        device: of the table.
        dim: of its rows.
        dtype: of its rows.
        eviction: its policy.
    """

    device: torch.device
    dim: int
    dtype: torch.dtype
    eviction: str

    def check(self, tensor: Tensor, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raises TypeError or ValueError for another dtype, shape or device."""
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{what} must be a tensor of dtype {dtype}, but is {kind}.")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{what} must have shape {shape}, but has {tuple(tensor.shape)}.")
        if tensor.device != self.device:
            raise ValueError(f"{what} must be on {self.device}, but is on {tensor.device}.")

    def check_call(self, ids: Tensor, scores: Tensor | None) -> None:
        """What every call takes that may change scores."""
        if isinstance(ids, Tensor) and ids.dim() != 1:
            raise ValueError(f"ids must have one dimension, but has shape {list(ids.shape)}.")
        self.check(ids, "ids", torch.int64, tuple(getattr(ids, "shape", ())))
        self.check_scores(scores, ids)

    def check_rows(self, rows: Tensor, ids: Tensor) -> None:
        """A row for each id."""
        self.check(rows, "rows", self.dtype, (ids.numel(), self.dim))

    def check_scores(self, scores: Tensor | None, ids: Tensor) -> None:
        """A score for each id, where the policy takes any."""
        if scores is None:
            if self.eviction == "customized":
                raise ValueError("scores must be given under eviction 'customized'.")
            return
        if self.eviction in _OWN_SCORES:
            raise ValueError(
                f"scores must not be given under eviction {self.eviction!r}, which makes its own."
            )
        self.check(scores, "scores", torch.int64, (ids.numel(),))
