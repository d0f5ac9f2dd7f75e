"""Tables to save, and comparisons of their whole contents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.initial_value import mix64
from tests.support.table_model import TAKES_SCORES
from tests.support.table_observation import score_of
from tests.support.tables import distinct_ids, make, random_rows
from torchrec_hkv.hash_table import HashTable


def filled(device: str, n: int = 500, capacity: int = 700, **options: Any) -> HashTable:
    """Creates a table with ``n`` ids from several calls and epochs, and random states."""
    table = make(device, capacity, **options)
    ids = distinct_ids(n, device)
    calls = max(1, min(7, n))
    for part in ids.chunk(calls) if n else ():
        table.epoch += part.numel() % 3
        scores = None
        if table.eviction in TAKES_SCORES:
            low, high = (0, 40) if table.eviction != "customized" else (-(2**63), 2**63 - 1)
            scores = torch.randint(low, high, part.shape).to(device)
        table.insert_or_assign(part, random_rows(table, part.numel()), scores)
    state = table._group.export_table(0)
    states = torch.randn(state.states.shape).to(device)
    if table.dtype.is_floating_point:
        state.rows[state.occupied.nonzero().flatten()[:3]] = float("nan")  # only bits compare equal
    table._group.load_table(0, dataclasses.replace(state, states=states))
    return table


def like(table: HashTable, device: str | None = None, **options: Any) -> HashTable:
    """Creates an empty table of the same kind."""
    spec = table._group.tables[0]
    same = {
        "capacity": spec.capacity,
        "dim": spec.dim,
        "dtype": spec.dtype,
        "eviction": spec.eviction,
        "state_dim": table.state_dim,
    }
    return make(device or table.device.type, **{**same, **options})


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def _bytes_of_rows(matrix: Tensor) -> list[bytes]:
    """Returns the bits of each row."""
    bits = _bits(matrix)
    width, data = bits.shape[1], bytes(bits.flatten().tolist())
    return [data[at * width : (at + 1) * width] for at in range(len(bits))]


def snapshot(table: HashTable) -> dict[str, Tensor]:
    """Returns the whole contents of a table by slot, for bitwise comparison."""
    state = vars(table._group.export_table(0))
    snapshot = {name: _bits(value) for name, value in state.items()}
    snapshot["clock and epoch"] = torch.tensor([table._group.clock, table.epoch])
    return snapshot


def assert_same(snapshot: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compares two snapshots."""
    for name, value in snapshot.items():
        assert torch.equal(value, other[name]), name


def entries(table: HashTable) -> dict[int, tuple[bytes, int, int, bytes]]:
    """Returns (row, last step, score, state) by id, without slots."""
    state = table._group.export_table(0)
    at = state.occupied.cpu().nonzero().flatten()
    n = table.capacity
    rows, states = state.rows.cpu(), state.states.cpu()
    scores = state.scores.cpu() if state.scores.numel() else torch.zeros(n, dtype=torch.int64)
    columns = (
        state.ids.cpu()[at].tolist(),
        _bytes_of_rows(rows[at]),
        (state.last_steps.cpu()[at].long() % 2**32).tolist(),
        [score_of(score, table.eviction) for score in scores[at].tolist()],
        _bytes_of_rows(states[at]),
    )
    return {id_: tuple(rest) for id_, *rest in zip(*columns, strict=True)}


def buckets_of(id_: int, buckets: int) -> set[int]:
    """Returns the candidate buckets of an id, by the documented formula."""
    hashed = mix64(id_ % 2**64 ^ 0x6A09E667F3BCC909)
    first, second = (hashed >> 32) * buckets >> 32, (hashed & 0xFFFFFFFF) * buckets >> 32
    if first == second and buckets > 1:
        second = (first + 1) % buckets
    return {first, second}


def owner_of(id_: int) -> int:
    """Returns the owner bucket of an id, by the documented formula."""
    return mix64((id_ + 0x9E3779B97F4A7C15) % 2**64) >> 48


def shard_files(folder: Path) -> list[Path]:
    """Returns the files in the order of their owner buckets."""
    return sorted(folder.glob("shard-*.safetensors"))


def assert_refused(
    load: Callable[[HashTable], Any], table: HashTable, match: str
) -> pytest.ExceptionInfo[ValueError]:
    """Checks that loading raises a one-sentence error and changes nothing."""
    before = snapshot(table)
    with pytest.raises(ValueError, match=match) as caught:
        load(table)
    assert_same(before, snapshot(table))
    return caught
