"""The epoch of tables that evict by epochs."""

from __future__ import annotations

from torch import nn

from torchrec_hkv.hash_table.spec_checks import check_range
from torchrec_hkv.sharding.state.names import named_collections

_LAST = (1 << 32) - 1


def set_epoch(model: nn.Module, epoch: int) -> None:
    """Begins an epoch, for all tables of a model under ``"epoch_lru"`` or ``"epoch_lfu"``.

    Call it on every rank with the same number, where an epoch of yours begins: a day of the data,
    or a pass over it. Ids of an earlier epoch then leave a full table before those of a later one.
    It counts for lookups that are made from now on; a train pipeline has begun none of the batches
    that ``progress`` has yet to look up. It waits for nothing. Checkpoints keep the epoch.

    Args:
        model: sharded, on this rank.
        epoch: 0 to 2^32 - 1. At first it is 0. It may go back.

    Raises:
        ValueError: the number is out of range, or no table of the model has epochs; nothing has
            changed then.
    """
    check_range("set_epoch", "epoch", epoch, 0, _LAST)
    collections = [collection for _, collection in named_collections(model)]
    tables = [table for collection in collections for table in collection.found_tables().values()]
    if not any(table.planned.shards[0].options.has_epochs for table in tables):
        raise ValueError(
            "set_epoch was called on a model without tables that have epochs: give tables "
            "HKVOptions(eviction='epoch_lru') or 'epoch_lfu'."
        )
    for collection in collections:
        for lookup in set(collection.group_lookups().values()):
            lookup.set_epoch(epoch)


def get_epoch(model: nn.Module) -> int:
    """The epoch that :func:`set_epoch` has set, or that a checkpoint had; 0 at first, and on a rank
    without tables.

    Args:
        model: sharded, on this rank.
    """
    lookups = [
        lookup
        for _, collection in named_collections(model)
        for lookup in collection.group_lookups().values()
    ]
    return max((lookup.epoch() for lookup in lookups), default=0)
