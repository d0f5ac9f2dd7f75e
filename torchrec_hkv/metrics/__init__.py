"""Metrics of tables, read from counters on the device without blocking a step."""

from torchrec_hkv.metrics.console import ConsoleLine, describe
from torchrec_hkv.metrics.table_metrics import TableMetrics
from torchrec_hkv.metrics.tensorboard import TensorBoard
from torchrec_hkv.metrics.watch import Watch, collect

__all__ = ["ConsoleLine", "TableMetrics", "TensorBoard", "Watch", "collect", "describe"]
