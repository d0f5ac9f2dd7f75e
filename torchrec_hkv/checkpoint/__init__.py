"""Checkpoints of sharded models: hash tables in files of their own, the rest by
:mod:`torch.distributed.checkpoint`."""

from torchrec_hkv.checkpoint.digests import digest
from torchrec_hkv.checkpoint.files import load, save

__all__ = ["digest", "load", "save"]
