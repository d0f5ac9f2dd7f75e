# ruff: noqa: F401
"""Imports of the process that forks ranks, so that ranks start in milliseconds."""

from __future__ import annotations

import gc

import tests.support.checkpoint_models
import torchrec_hkv.checkpoint
import torchrec_hkv.planner
import torchrec_hkv.serving

gc.collect()
gc.freeze()
