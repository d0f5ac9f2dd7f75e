"""Planning: constraints that name backends, costs beside stock kernels, the report."""

from torchrec_hkv.planner.constraints import ParameterConstraints
from torchrec_hkv.planner.planner import EmbeddingShardingPlanner

__all__ = ["EmbeddingShardingPlanner", "ParameterConstraints"]
