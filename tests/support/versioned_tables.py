"""A table that another thread changes version by version, to detect partial changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from torchrec_hkv.hash_table import HashTable

FIXED, BATCH = 300, 70
VERSIONS = 250


def make_versioned(device: str, **options: object) -> HashTable:
    """Creates a small table that can grow a lot, at version 0."""
    table = HashTable(3, 2 * VERSIONS * BATCH, device=device, initial_capacity=64, **options)
    table.insert_or_assign(torch.arange(FIXED, device=device), rows_of(table, FIXED, 0))
    return table


def rows_of(table: HashTable, n: int, version: int) -> Tensor:
    """Creates rows that contain their version."""
    return torch.full((n, table.dim), float(version), device=table.device)


def advance(table: HashTable, version: int) -> None:
    """Writes a version: the fixed ids get its rows, and a batch of new ids arrives with them."""
    table.assign_rows(torch.arange(FIXED, device=table.device), rows_of(table, FIXED, version))
    first = FIXED + (version - 1) * BATCH
    ids = torch.arange(first, first + BATCH, device=table.device)
    table.insert_or_assign(ids, rows_of(table, BATCH, version))


@contextlib.contextmanager
def changing(table: HashTable) -> Iterator[None]:
    """A context in which another thread writes version after version."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for version in range(1, VERSIONS):
                if stop.is_set():
                    return
                advance(table, version)
        except BaseException as error:  # raised again by the test's thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors, errors


def version_of(ids: Tensor, rows: Tensor) -> int:
    """Returns the version of a table's entries; fails if they don't belong to one version."""
    rows = rows.cpu()[:, 0].long()
    ids, order = ids.cpu().sort()
    rows = rows[order]
    assert torch.equal(ids, torch.arange(len(ids))), "ids are missing"
    assert (len(ids) - FIXED) % BATCH == 0, "a batch is there in part"
    batches = (len(ids) - FIXED) // BATCH
    versions = rows[:FIXED].unique().tolist()
    assert len(versions) == 1, f"fixed ids are of the versions {versions}"
    assert versions[0] in (batches, batches + 1)
    assert torch.equal(rows[FIXED:], torch.arange(1, batches + 1).repeat_interleave(BATCH))
    return versions[0]
