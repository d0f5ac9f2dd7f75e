"""The dtype of lookup outputs: TorchRec's fused parameter ``output_dtype``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from torchrec_hkv.backends import registry
from torchrec_hkv.sharding.parameter_sharding import KERNEL, BackendParameterSharding

OUTPUT_DTYPE = "output_dtype"


def output_dtype(table: str, requested: Any) -> torch.dtype:
    """Converts ``output_dtype`` to a torch dtype; None is float32, as for stock tables.

    Args:
        table: name of the table, for the message.
        requested: FBGEMM's ``SparseType``, TorchRec's ``DataType``, or None.

    Raises:
        ValueError: ``requested`` has another type.
    """
    if requested is None:
        return torch.float32
    if isinstance(requested, SparseType):
        return requested.as_dtype()
    if isinstance(requested, DataType):
        return data_type_to_dtype(requested)
    raise ValueError(
        f"Table {table!r} has output_dtype={requested!r}, but it must be a SparseType or a "
        "DataType."
    )


def check_output_dtype(table: str, backend: str, requested: Any) -> torch.dtype:
    """Converts ``output_dtype`` of a table on a backend; see :func:`output_dtype`.

    Raises:
        ValueError: the backend does not support the dtype.
    """
    dtype = output_dtype(table, requested)
    allowed = registry.get(backend).output_dtypes
    if dtype not in allowed:
        raise ValueError(
            f"Table {table!r} has output_dtype={requested}, but backend {backend!r} supports only "
            f"{', '.join(map(str, allowed))}."
        )
    return dtype


def output_dtype_of_ranks(
    groups_of_ranks: Iterable[Iterable[GroupedEmbeddingConfig]],
) -> torch.dtype:
    """The output dtype of a sharding's groups on all ranks, which all have the same dtype
    (:func:`check_output_dtypes`)."""
    for group in itertools.chain.from_iterable(groups_of_ranks):
        requested = (group.fused_params or {}).get(OUTPUT_DTYPE)
        return output_dtype(group.embedding_tables[0].name, requested)
    return torch.float32


def check_output_dtypes(
    shardings: Mapping[str, ParameterSharding], fused_params: Mapping[str, Any] | None
) -> None:
    """Checks that outputs in the same exchange have the same dtype.

    Args:
        shardings: the plan of a collection's tables.
        fused_params: fused parameters of the sharder.

    Raises:
        ValueError: a backend does not support a dtype, or output dtypes differ.
    """
    found: dict[str, dict[str, torch.dtype]] = {}
    for name, sharding in shardings.items():
        requested = sharding.output_dtype
        if requested is None:
            requested = (fused_params or {}).get(OUTPUT_DTYPE)
        if isinstance(sharding, BackendParameterSharding) and sharding.compute_kernel == KERNEL:
            dtype = check_output_dtype(name, sharding.backend, requested)
        elif sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value:
            dtype = torch.float32  # dense kernels ignore output_dtype
        else:
            dtype = output_dtype(name, requested)
        found.setdefault(sharding.sharding_type, {})[name] = dtype
    for dtypes in found.values():
        (first, dtype), *others = dtypes.items()
        for name, other in others:
            backend_dtypes = {first, name} & {
                table
                for table, sharding in shardings.items()
                if isinstance(sharding, BackendParameterSharding)
            }
            if other != dtype and backend_dtypes:
                raise ValueError(
                    f"Table {first!r} has outputs of {dtype} and table {name!r} of {other}, but "
                    "tables of one collection and sharding type are exchanged together and need "
                    "the same dtype: set output_dtype in the sharder's fused_params."
                )
