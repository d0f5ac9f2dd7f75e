"""Warnings that name the line of the user."""

from torchrec_hkv.warn import warn

__all__ = ["warn"]
