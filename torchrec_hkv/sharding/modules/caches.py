"""Caches that backends keep of a model's tables."""

from __future__ import annotations

from torch import nn

from torchrec_hkv.sharding.modules.collection import BackendCollection


def populate_caches(model: nn.Module) -> int:
    """Chooses anew what the caches of a model's tables hold, where backends have such.

    Of ``tt`` tables with a ``cache_size``: the rows of the ids that occurred most often
    (docs/concepts/tensor_train.md). To be called between a backward and the next forward, on every
    rank.

    Args:
        model: sharded.

    Returns:
        Caches on this rank; a table-wise table has its cache on one rank only.

    Raises:
        ValueError: the model has no table on a backend.
    """
    collections = [m for m in model.modules() if isinstance(m, BackendCollection)]
    if not any(collection.has_backends for collection in collections):
        raise ValueError("The model has no tables on backends: there are no caches.")
    # Tables of a group share a lookup.
    lookups = dict.fromkeys(
        lookup for collection in collections for lookup in collection.group_lookups().values()
    )
    return sum(lookup.populate_caches() for lookup in lookups)
