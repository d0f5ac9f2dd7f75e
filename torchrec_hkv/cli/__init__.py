"""The command ``torchrec-hkv``."""

from torchrec_hkv import needs_torchrec  # noqa: F401
from torchrec_hkv.cli.main import main

__all__ = ["main"]
