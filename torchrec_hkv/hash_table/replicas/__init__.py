"""Replicas of tables: several groups of ranks hold and train all tables, and merge them by id.

``docs/concepts/replicas.md`` has the rules.
"""

from torchrec_hkv.hash_table.replicas.sync import (
    GroupSync,
    check_together,
    id_sync_bytes,
    sync_together,
)
from torchrec_hkv.hash_table.replicas.table_sync import Synced
from torchrec_hkv.hash_table.replicas.wire import Wire, swaps

__all__ = [
    "GroupSync",
    "Synced",
    "Wire",
    "check_together",
    "id_sync_bytes",
    "swaps",
    "sync_together",
]
