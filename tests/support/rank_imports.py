# ruff: noqa: F401
"""Modules that the process which forks ranks imports, so that a rank starts in milliseconds."""

from __future__ import annotations

import gc

import tests.support.checkpointed
import torchrec_hkv.checkpoint
import torchrec_hkv.planner
import torchrec_hkv.serving

gc.collect()
gc.freeze()
