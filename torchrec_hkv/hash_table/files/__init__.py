"""Hash tables in files: save, load, partial load, verification and digests.

``docs/reference/file_format.md`` describes the format. Start reading at ``save_load``. A table's
folder has a ``manifest`` and ``shard_files``, which are read and written as ``block_files``.
"""

from torchrec_hkv.hash_table.files.save_load import (
    BATCH_BYTES,
    Loaded,
    default_shard_bytes,
    load,
    save,
    saved_bytes,
    saved_spec,
    verify,
)

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
