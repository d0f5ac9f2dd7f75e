"""The planner: constraints that name backends, costs compared with stock kernels, the report."""

from torchrec_hkv import needs_torchrec  # noqa: F401
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.planner.calibration import Calibration, default_path
from torchrec_hkv.planner.constraints import ParameterConstraints
from torchrec_hkv.planner.planner import EmbeddingShardingPlanner
from torchrec_hkv.planner.quality_curve import QualityCurve

__all__ = [
    "Calibration",
    "EmbeddingShardingPlanner",
    "IdFrequencies",
    "ParameterConstraints",
    "QualityCurve",
    "default_path",
]
