"""What the tables of a sharded model have counted on this rank."""

from __future__ import annotations

from torch import nn

from torchrec_hkv.sharding.collection import BackendCollection


def table_counters(model: nn.Module) -> dict[str, dict[str, int]]:
    """Counts of each table of ours that this rank holds, by table name.

    Waits for the device, so it belongs to every so many steps, not to each.

    Args:
        model: a sharded model, or a part of one.

    Returns:
        For each table what its backend counts; hash tables give ``lookups``, ``hits``,
        ``inserted``, ``evicted``, ``refused``, ``size`` and ``capacity``. All are this rank's own:
        add them up over ranks.
    """
    return {
        name: lookup.counters(name)
        for module in model.modules()
        if isinstance(module, BackendCollection)
        for name, lookup in module.group_lookups().items()
    }
