"""Caches of a model's tables on backends."""

from __future__ import annotations

from torch import nn

from torchrec_hkv.backends import CachedLookup
from torchrec_hkv.sharding.modules.collection import BackendCollection


def populate_caches(model: nn.Module) -> int:
    """Selects the rows of the caches of a model's tables again, on backends with caches.

    The caches of ``tt`` tables with a ``cache_size`` get the rows of the most frequent ids
    (docs/concepts/tensor_train.md). Call it on every rank between a backward and the next forward.

    Args:
        model: the sharded model.

    Returns:
        Number of caches on this rank. A table-wise table has its cache on one rank only.

    Raises:
        ValueError: the model has no table on a backend.
    """
    collections = [m for m in model.modules() if isinstance(m, BackendCollection)]
    if not any(collection.has_backends for collection in collections):
        raise ValueError(
            "The model has no tables on backends, so it has no caches: leave populate_caches out."
        )
    # Tables of a group share a lookup, so remove duplicates.
    lookups = dict.fromkeys(
        lookup for collection in collections for lookup in collection.group_lookups().values()
    )
    return sum(lookup.populate_caches() for lookup in lookups if isinstance(lookup, CachedLookup))
