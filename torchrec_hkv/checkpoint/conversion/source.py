"""What a conversion reads: tables of ids and rows, whatever wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from torchrec_hkv.backends.optimizers import layout_of
from torchrec_hkv.backends.specs import OptimizerSpec
from torchrec_hkv.hash_table.files.state_columns import StateColumns

#: Policies of tables that a conversion makes.
EVICTIONS = ("lru", "lfu", "customized")
Eviction = Literal["lru", "lfu", "customized"]
#: Optimizers of tables that a conversion makes.
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "ftrl")
#: Data types of rows.
ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)

ROW_STATES = "optimizer_row_states"


def state_name(k: int) -> str:
    """Name of the k-th optimizer state that each column has."""
    return f"optimizer_states_{k}"


@dataclasses.dataclass(frozen=True)
class SourceTable:
    """A table that is converted.

    Attributes:
        name: its key in a ``state_dict``, without ``.weight``.
        dim: columns of a row.
        dtype: of its rows.
        entries: ids that it has, at most.
        read: takes bytes of memory and yields entries: ``ids``, int64 ``[n]``; ``weight``,
            ``[n, dim]``; and as far as the table has them ``optimizer_states_0`` and ``_1``,
            ``[n, dim]``, ``optimizer_row_states``, ``[n, values]``, ``scores``, int64 ``[n]``, and
            ``last_steps``, int32 ``[n]``. Tensors are valid until the next ones.
        optimizer: whose states there are; None where there are none.
        eviction: what scores are: counts of lookups (``"lfu"``) or given ones (``"customized"``).
        clock: the last step that ``last_steps`` may name.
        updates: how often the optimizer has updated the table.
        is_exact: whether it has as many ids as ``entries`` says.
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
        """Bytes of an entry, at most."""
        states = states_of(self.optimizer)
        return 24 + 4 * states.of_rows + self.dim * (self.dtype.itemsize + 4 * states.of_columns)

    @property
    def bytes(self) -> int:
        """Of all entries."""
        return self.entries * self.entry_bytes


def states_of(optimizer: OptimizerSpec | None) -> StateColumns:
    """What the states of a row are."""
    return StateColumns.of_layout(layout_of(optimizer))


def split_states(states: Tensor, optimizer: OptimizerSpec, dim: int) -> dict[str, Tensor]:
    """States of rows by name.

    Args:
        states: ``[n, width]``: the values of all columns, one quantity after the other, then what a
            row has once.
        optimizer: whose states they are.
        dim: columns of a row.
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
    """Entries of a source with all that a hash table keeps of them.

    Args:
        entries: as :attr:`SourceTable.read` yields them.
        table: that they are of.
        optimizer: whose states the hash table has; those that are missing are 0.
        clock: of the hash table; last steps keep their distance from it.
        given_scores: whether scores are given ones and not counts.
    """
    n = len(entries["ids"])
    made = dict(entries)
    states = states_of(optimizer)
    widths = {state_name(k): table.dim for k in range(states.of_columns)}
    if states.of_rows:
        widths[ROW_STATES] = states.of_rows
    for name, width in widths.items():
        if name not in made:
            made[name] = torch.zeros(n, width)
    steps, scores = entries.get("last_steps"), entries.get("scores")
    if steps is None:
        made["last_steps"] = torch.full((n,), clock).to(torch.int32)
    else:
        # Unsigned, in a signed type.
        shifted = (steps.long() & 0xFFFFFFFF) + (clock - table.clock)
        made["last_steps"] = shifted.to(torch.int32)
    if scores is None:
        # An id whose lookups nobody counted counts once.
        made["scores"] = torch.zeros(n).long() if given_scores else torch.ones(n).long()
    elif not given_scores:
        made["scores"] = scores.clamp(min=1)
    return made


def optimizer_of_width(name: str, width: int, dim: int, given: str | None) -> OptimizerSpec:
    """The optimizer whose states have a width.

    Args:
        name: the table's.
        width: of the states of a row.
        dim: columns of a row.
        given: what was said; None: what the width tells.

    Raises:
        ValueError: the width is of no optimizer, or of another one than was said.
    """

    def needed(optimizer: str) -> int:
        parts = states_of(OptimizerSpec(optimizer))
        return parts.of_columns * dim + parts.of_rows

    if given is None:
        likely = ("rowwise_adagrad", "adagrad", "adam", "rowwise_adam")
        given = next((optimizer for optimizer in likely if needed(optimizer) == width), None)
        if given is None:
            raise ValueError(
                f"Table {name!r} has {width} values of optimizer states a row of {dim}, which "
                "tells no optimizer: name it by --optimizer, or leave them out by --without states."
            )
    if width < needed(given):
        raise ValueError(
            f"Table {name!r} has {width} values of optimizer states a row of {dim}, but {given} "
            f"has {needed(given)}: name another --optimizer, or leave the states out by --without "
            "states."
        )
    return OptimizerSpec(given)


def check_row_type(name: str, dtype: torch.dtype) -> None:
    """Refuses rows that are none of the types that tables have.

    Raises:
        ValueError: the sentence names the table and the type.
    """
    if dtype not in ROW_TYPES:
        raise ValueError(
            f"Table {name!r} has rows of {dtype}, but {', '.join(map(str, ROW_TYPES))} are taken."
        )
