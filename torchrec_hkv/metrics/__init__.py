"""What tables do and hold, from counters on the device, read without making a step wait."""

from torchrec_hkv.metrics.console import ConsoleLine, describe
from torchrec_hkv.metrics.table_metrics import TableMetrics
from torchrec_hkv.metrics.tensorboard import TensorBoard
from torchrec_hkv.metrics.watch import Watch, collect

__all__ = ["ConsoleLine", "TableMetrics", "TensorBoard", "Watch", "collect", "describe"]
