"""Accumulation of gradients over several backwards, for the tables that backends serve."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from torchrec_hkv.backends import registry
from torchrec_hkv.sharding.modules.collection import BackendCollection


@contextlib.contextmanager
def accumulate_gradients(model: nn.Module) -> Iterator[None]:
    """Within it, backwards do not train the rows of a model's tables on backends.

    Forwards and backwards within it hold their gradients; the first backward whose forward was made
    outside applies the sum of all as one update, as ``DistributedDataParallel.no_sync`` does it for
    dense parameters. Stock fused tables are not held: TorchRec's train in every backward.

    Args:
        model: sharded.

    Raises:
        ValueError: the model has no table on a backend, or one on a backend that can't accumulate;
            the same on all ranks, those that don't hold the table among them.
    """
    collections = [m for m in model.modules() if isinstance(m, BackendCollection)]
    if not any(collection.has_backends for collection in collections):
        raise ValueError("The model has no tables on backends: there is nothing to accumulate.")
    for collection in collections:
        for name, table in collection.found_tables().items():
            if not registry.get(table.planned.backend).accumulates:
                raise ValueError(
                    f"Table {name!r} is on backend {table.planned.backend!r}, which can't hold "
                    "gradients over several backwards: leave accumulate_gradients out."
                )
    # Tables of a group share a lookup.
    lookups = dict.fromkeys(
        lookup for collection in collections for lookup in collection.group_lookups().values()
    )
    with contextlib.ExitStack() as stack:
        for lookup in lookups:
            stack.enter_context(lookup.accumulate())
        yield
