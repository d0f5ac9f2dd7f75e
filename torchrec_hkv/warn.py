"""Warnings that point to the user's code."""

from __future__ import annotations

import sys
import warnings


def warn(message: str) -> None:
    """Warns, with the innermost line outside this package as location."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("torchrec_hkv."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
