"""Replays logs of ids through hash tables on a CPU, to find hit rates by rows and policy.

Uses the backend ``hkv``, its tables and the planner's id frequencies; independent of sharding.
"""

from torchrec_hkv.replay.log import Ids, Log, LogError, Part
from torchrec_hkv.replay.open_log import FORMATS, open_log
from torchrec_hkv.replay.policy import Policy, Rule, evictions
from torchrec_hkv.replay.replayed_log import Capacity, ReplayedLog
from torchrec_hkv.replay.result import Curve, Point, Replayed
from torchrec_hkv.replay.run import TableSettings, replay

__all__ = [
    "FORMATS",
    "Capacity",
    "Curve",
    "Ids",
    "Log",
    "LogError",
    "Part",
    "Point",
    "Policy",
    "Replayed",
    "ReplayedLog",
    "Rule",
    "TableSettings",
    "evictions",
    "open_log",
    "replay",
]
