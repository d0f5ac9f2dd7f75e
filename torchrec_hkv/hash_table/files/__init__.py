"""Tables in files: saved, loaded whole or in parts, verified, and their digests.

``docs/reference/file_format.md`` has the format. ``save_load`` is where to begin: a table's folder
is a ``manifest`` and ``shard_files``, which are read and written as ``block_files``.
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
