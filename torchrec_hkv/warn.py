"""Warnings that name the line of the user."""

from __future__ import annotations

import sys
import warnings


def warn(message: str) -> None:
    """Warns; shown is the line outside of this package that led to it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("torchrec_hkv."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
