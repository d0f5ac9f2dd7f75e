"""Checkpoints of sharded models: thin over :mod:`torch.distributed.checkpoint`."""

from torchrec_hkv.checkpoint.files import load, save

__all__ = ["load", "save"]
