"""Checkpoints of sharded models: hash tables in files of their own, the rest by
:mod:`torch.distributed.checkpoint`."""

from torchrec_hkv import needs_torchrec  # noqa: F401
from torchrec_hkv.checkpoint.compact import compact
from torchrec_hkv.checkpoint.deltas import DeltaWriter
from torchrec_hkv.checkpoint.digests import digest
from torchrec_hkv.checkpoint.files import load, save
from torchrec_hkv.checkpoint.rows import export_rows, import_rows

__all__ = ["DeltaWriter", "compact", "digest", "export_rows", "import_rows", "load", "save"]
