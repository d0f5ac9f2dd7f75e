"""Groups of tables that are looked up and trained in one call: ``TableGroup`` and its parts."""

from torchrec_hkv.hash_table.groups.table_group import TableGroup

__all__ = ["TableGroup"]
