"""Checks of the arguments of calls. They run before a call gets its number, so a call that raises
does not count as a step."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv.hash_table.id_types import int64_ids
from torchrec_hkv.hash_table.stored_rows import number_dtype
from torchrec_hkv.hash_table.table_spec import TableSpec

#: Policies that compute scores themselves.
_OWN_SCORES = ("lru", "epoch_lru")


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """Properties of the arguments that the calls of a group accept.

    Attributes:
        device: device of the tables.
        row_width: number of columns of rows: the dim of the widest table.
        dtype: dtype of rows: that of the tables, or float32 if theirs differ or are int8.
        evictions: the policies of the tables, without repetition.
    """

    device: torch.device
    row_width: int
    dtype: torch.dtype
    evictions: tuple[str, ...]

    @classmethod
    def of(cls, tables: tuple[TableSpec, ...], device: torch.device) -> CallArguments:
        """The properties for a group of these tables."""
        dtypes = {spec.dtype for spec in tables}
        return cls(
            device,
            max(spec.dim for spec in tables),
            number_dtype(dtypes.pop()) if len(dtypes) == 1 else torch.float32,
            tuple(dict.fromkeys(spec.eviction for spec in tables)),
        )

    def check(self, tensor: Tensor, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Checks a tensor.

        Raises:
            TypeError: the dtype is another.
            ValueError: the shape or the device is another.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{what} must be a tensor of dtype {dtype}, but is {kind}.")
        _check_strided(what, tensor)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{what} must have shape {shape}, but has {tuple(tensor.shape)}.")
        if tensor.device != self.device:
            raise ValueError(f"{what} must be on {self.device}, but is on {tensor.device}.")

    def checked_ids(self, ids: Tensor) -> Tensor:
        """Checks ids and returns them as contiguous int64."""
        if isinstance(ids, Tensor):
            _check_strided("ids", ids)
        converted = int64_ids(ids)
        if ids.dim() != 1:
            raise ValueError(f"ids must have one dimension, but has shape {list(ids.shape)}.")
        if ids.device != self.device:
            raise ValueError(f"ids must be on {self.device}, but is on {ids.device}.")
        return converted.contiguous()

    def check_rows(self, rows: Tensor, ids: Tensor) -> None:
        """Checks that there is a row per id."""
        _check_strided("ids", ids)
        self.check(rows, "rows", self.dtype, (ids.numel(), self.row_width))

    def check_scores(self, scores: Tensor | None, ids: Tensor) -> None:
        """Checks that there is a score per id if a policy takes scores, and none otherwise."""
        if scores is None:
            if "customized" in self.evictions:
                raise ValueError("scores must be given under eviction 'customized'.")
            return
        if all(eviction in _OWN_SCORES for eviction in self.evictions):
            policies = " and ".join(map(repr, self.evictions))
            makes = "makes its own" if len(self.evictions) == 1 else "make their own"
            raise ValueError(f"scores must not be given under eviction {policies}, which {makes}.")
        self.check(scores, "scores", torch.int64, (ids.numel(),))


def _check_strided(what: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{what} must be a dense tensor, but is {kind}: convert it first.")
