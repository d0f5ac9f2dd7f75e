"""Calibrates TorchRec's ``fused`` kernel, by the same steps as backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_hkv.backends.calibration import row_batches, row_tables, rows_in, time_steps
from torchrec_hkv.backends.constants import Constants, TimedStep, fit_constants
from torchrec_hkv.backends.workload import Work, Workload, row_work

#: The stock kernel that is calibrated.
FUSED = EmbeddingComputeKernel.FUSED.value
#: It and its variants take numbers of columns that are multiples of this.
FUSED_COLUMNS = 4
_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}


def fused_work(load: Workload, dim: int, table_bytes: float, rows: int) -> Work:
    """The work of a step on a stock table.

    Args:
        load: the step's ids in the shard.
        dim: number of columns of the shard.
        table_bytes: bytes of the shard with its optimizer states.
        rows: number of rows of the shard.
    """
    return row_work(load, dim, table_bytes / max(rows, 1))


def calibrate_fused(device: torch.device, progress: Callable[[str], None]) -> Constants:
    """The constants of TorchRec's ``fused`` kernel on a device.

    Args:
        device: device of the tables.
        progress: called with a line of text before each table is timed.
    """
    on_gpu = device.type == "cuda"
    samples = []
    for size, dim, optimizer in row_tables(device.type):
        rows = rows_in(size, dim, optimizer)
        progress(f"{FUSED}: {rows:,} rows of {dim}, {optimizer}")
        table = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    rows,
                    dim,
                    EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST,
                    ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU,
                )
            ],
            optimizer=_OPTIMIZERS[optimizer],
            learning_rate=1e-6,
            eps=1e-6,
            device=device,
        )
        table.init_embedding_weights_uniform(-0.01, 0.01)

        def step(
            ids: Tensor,
            offsets: Tensor,
            bags: int,
            table: SplitTableBatchedEmbeddingBagsCodegen = table,
        ) -> Tensor:
            return table(ids, offsets)

        for batch in row_batches(device.type):
            step_time, load = time_steps(step, batch, rows, device)
            samples.append(TimedStep(fused_work(load, dim, size, rows), step_time, float(size)))
    return fit_constants(samples)
