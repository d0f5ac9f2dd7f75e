"""The tables that a conversion reads, in a form that does not depend on their source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from torchrec_hkv.backends.optimizers import layout_of
from torchrec_hkv.backends.specs import OptimizerSpec
from torchrec_hkv.hash_table.files.state_columns import StateColumns

#: Policies of tables that a conversion creates.
EVICTIONS = ("lru", "lfu", "customized")
Eviction = Literal["lru", "lfu", "customized"]
#: Optimizers of tables that a conversion creates.
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "ftrl")
#: Dtypes of rows.
ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)

ROW_STATES = "optimizer_row_states"


def state_name(k: int) -> str:
    """Name of the k-th optimizer state with one value for each column."""
    return f"optimizer_states_{k}"


@dataclasses.dataclass(frozen=True)
class SourceTable:
    """A table to convert.

    Attributes:
        name: key of the table in a ``state_dict``, without ``.weight``.
        dim: number of columns of a row.
        dtype: dtype of the rows.
        entries: maximal number of ids.
        read: a function of a memory limit in bytes that yields entries: ``ids``, int64 ``[n]``, and
            ``weight``, ``[n, dim]``. If the table has them, also ``optimizer_states_0`` and ``_1``,
            ``[n, dim]``, ``optimizer_row_states``, ``[n, values]``, ``scores``, int64 ``[n]``, and
            ``last_steps``, int32 ``[n]``. Tensors are valid until the next iteration.
        optimizer: the optimizer whose states the table has; None without states.
        eviction: what scores are: counts of lookups (``"lfu"``) or given scores
            (``"customized"``).
        clock: largest possible value in ``last_steps``.
        updates: number of updates by the optimizer.
        is_exact: whether the number of ids is exactly ``entries``.
    """

    name: str
    dim: int
    dtype: torch.dtype
    entries: int
    read: Callable[[int], Iterator[dict[str, Tensor]]]
    optimizer: OptimizerSpec | None = None
    eviction: Eviction = "lru"
    clock: int = 0
    updates: int = 0
    is_exact: bool = False

    @property
    def entry_bytes(self) -> int:
        """Maximal size of an entry in bytes."""
        states = states_of(self.optimizer)
        return 24 + 4 * states.of_rows + self.dim * (self.dtype.itemsize + 4 * states.of_columns)

    @property
    def bytes(self) -> int:
        """Maximal size of all entries in bytes."""
        return self.entries * self.entry_bytes


def states_of(optimizer: OptimizerSpec | None) -> StateColumns:
    """The layout of the states of a row."""
    return StateColumns.of_layout(layout_of(optimizer))


def split_states(states: Tensor, optimizer: OptimizerSpec, dim: int) -> dict[str, Tensor]:
    """Splits the states of rows by their names.

    Args:
        states: ``[n, width]``: states with one value for each column, one after the other, then
            states with one value for each row.
        optimizer: the optimizer of the states.
        dim: number of columns of a row.
    """
    parts = states_of(optimizer)
    split = {state_name(k): states[:, k * dim : (k + 1) * dim] for k in range(parts.of_columns)}
    if parts.of_rows:
        begin = parts.of_columns * dim
        split[ROW_STATES] = states[:, begin : begin + parts.of_rows]
    return split


def completed(
    entries: dict[str, Tensor],
    table: SourceTable,
    optimizer: OptimizerSpec | None,
    clock: int,
    *,
    given_scores: bool,
) -> dict[str, Tensor]:
    """Completes entries of a source by everything that a hash table stores for an entry.

    Args:
        entries: entries as :attr:`SourceTable.read` yields them.
        table: the table of the entries.
        optimizer: the optimizer of the hash table. Missing states are 0.
        clock: clock of the hash table. Last steps keep their distance to it.
        given_scores: whether scores are given scores, not counts.
    """
    n = len(entries["ids"])
    result = dict(entries)
    states = states_of(optimizer)
    widths = {state_name(k): table.dim for k in range(states.of_columns)}
    if states.of_rows:
        widths[ROW_STATES] = states.of_rows
    for name, width in widths.items():
        if name not in result:
            result[name] = torch.zeros(n, width)
    steps, scores = entries.get("last_steps"), entries.get("scores")
    if steps is None:
        result["last_steps"] = torch.full((n,), clock).to(torch.int32)
    else:
        # Steps are unsigned numbers in a signed dtype.
        shifted = (steps.long() & 0xFFFFFFFF) + (clock - table.clock)
        result["last_steps"] = shifted.to(torch.int32)
    if scores is None:
        # An id whose lookups were not counted gets the count 1.
        result["scores"] = torch.zeros(n).long() if given_scores else torch.ones(n).long()
    elif not given_scores:
        result["scores"] = scores.clamp(min=1)
    return result


def optimizer_of_width(name: str, width: int, dim: int, given: str | None) -> OptimizerSpec:
    """Finds the optimizer by the width of its states.

    Args:
        name: name of the table, for messages.
        width: number of values of the states of a row.
        dim: number of columns of a row.
        given: name of the optimizer; None: found from the width.

    Raises:
        ValueError: no optimizer has this width, or the given one needs more.
    """

    def needed(optimizer: str) -> int:
        parts = states_of(OptimizerSpec(optimizer))
        return parts.of_columns * dim + parts.of_rows

    if given is None:
        likely = ("rowwise_adagrad", "adagrad", "adam", "rowwise_adam")
        given = next((optimizer for optimizer in likely if needed(optimizer) == width), None)
        if given is None:
            raise ValueError(
                f"Table {name!r} has {width} values of optimizer states for each row of {dim}, "
                "which match no optimizer: name it by --optimizer, or leave the states out by "
                "--without states."
            )
    if width < needed(given):
        raise ValueError(
            f"Table {name!r} has {width} values of optimizer states for each row of {dim}, but "
            f"{given} has {needed(given)}: name another --optimizer, or leave the states out by "
            "--without states."
        )
    return OptimizerSpec(given)


def check_row_type(name: str, dtype: torch.dtype) -> None:
    """Checks the dtype of rows.

    Raises:
        ValueError: tables can't have this dtype; the message names the table and the dtype.
    """
    if dtype not in ROW_TYPES:
        raise ValueError(
            f"Table {name!r} has rows of {dtype}, but must have one of "
            f"{', '.join(map(str, ROW_TYPES))}."
        )
