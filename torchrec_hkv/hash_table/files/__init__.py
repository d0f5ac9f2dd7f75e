"""Hash tables in files: save, load, partial load, verification and digests.

``docs/reference/file_format.md`` describes the format. Start reading at ``table_save`` and
``table_load``. A table's folder has a ``manifest`` and ``shard_files``, which are read and written
as ``block_files``.
"""

from torchrec_hkv.hash_table.files.limits import BATCH_BYTES
from torchrec_hkv.hash_table.files.table_identity import saved_spec
from torchrec_hkv.hash_table.files.table_load import Loaded, load, verify
from torchrec_hkv.hash_table.files.table_save import default_shard_bytes, save, saved_bytes

__all__ = [
    "BATCH_BYTES",
    "Loaded",
    "default_shard_bytes",
    "load",
    "save",
    "saved_bytes",
    "saved_spec",
    "verify",
]
