"""Gradient accumulation over several backwards, for tables on backends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from torchrec_hkv.backends import registry
from torchrec_hkv.sharding.modules.collection import BackendCollection


@contextlib.contextmanager
def accumulate_gradients(model: nn.Module) -> Iterator[None]:
    """A context in which backwards do not update the tables on backends.

    Backwards of forwards in the context store their gradients. The first backward of a forward
    outside the context applies the sum of all gradients as one update, like
    ``DistributedDataParallel.no_sync`` for dense parameters. Stock fused tables are not affected:
    TorchRec updates them in every backward.

    Args:
        model: the sharded model.

    Raises:
        ValueError: the model has no table on a backend, or one on a backend that can't accumulate.
            All ranks raise, including those that do not hold the table.
    """
    collections = [m for m in model.modules() if isinstance(m, BackendCollection)]
    if not any(collection.has_backends for collection in collections):
        raise ValueError(
            "The model has no tables on backends, so there is nothing to accumulate: leave "
            "accumulate_gradients out."
        )
    for collection in collections:
        for name, table in collection.sharded_tables().items():
            if not registry.get(table.planned.backend).accumulates:
                raise ValueError(
                    f"Table {name!r} is on backend {table.planned.backend!r}, which can't "
                    "accumulate gradients over several backwards: leave accumulate_gradients out."
                )
    # Tables of a group share a lookup, so remove duplicates.
    lookups = dict.fromkeys(
        lookup for collection in collections for lookup in collection.group_lookups().values()
    )
    with contextlib.ExitStack() as stack:
        for lookup in lookups:
            stack.enter_context(lookup.accumulate())
        yield
