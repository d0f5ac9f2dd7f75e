"""Tables that are looked up and trained in one call: ``table_group`` and what it is made of."""

from torchrec_hkv.hash_table.groups.table_group import TableGroup

__all__ = ["TableGroup"]
