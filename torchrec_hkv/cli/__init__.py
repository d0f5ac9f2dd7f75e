"""The command ``torchrec-hkv``."""

from torchrec_hkv.cli.main import main

__all__ = ["main"]
