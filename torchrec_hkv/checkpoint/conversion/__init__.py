"""Tables of other programs as checkpoints of this one, and back."""

from torchrec_hkv.checkpoint.conversion.convert import Options, convert

__all__ = ["Options", "convert"]
