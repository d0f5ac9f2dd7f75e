"""The backend and the options of a table in a sharding plan.

TorchRec has one compute kernel for external kernels, ``customized_kernel``, and its enum can't be
extended. All backends share this kernel; the plan carries the backend's name and options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingTable
from torchrec.distributed.types import ParameterSharding

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import BackendOptions

#: The compute kernel of all tables on backends, as TorchRec sees it.
KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value

_FUSED_PARAM = "torchrec_hkv"


@dataclasses.dataclass(frozen=True)
class TableTag:
    """The part of a table's fused parameters that identifies its backend to the kernel.

    TorchRec groups tables with equal fused parameters. Tags are equal if backend, ``is_dense`` and
    ``row_dtype`` are equal, so tables of a backend are looked up together even if their options
    differ.

    Attributes:
        backend: name of the backend.
        options: the backend's options for this table.
        init_range: lowest and highest initial value.
        is_dense: whether the table is dense-compatible (:meth:`Backend.is_dense`).
        row_dtype: data type of the rows if it differs from the config's; None otherwise.
        is_unique: whether a lookup with a repeated id raises.
        full_name: full name of the table in the model (:mod:`torchrec_hkv.sharding.state.names`).
    """

    backend: str
    options: BackendOptions = dataclasses.field(compare=False)
    init_range: tuple[float, float] = dataclasses.field(compare=False)
    is_dense: bool
    is_unique: bool = dataclasses.field(default=False, compare=False)
    full_name: str = dataclasses.field(default="", compare=False)
    row_dtype: torch.dtype | None = None


@dataclasses.dataclass
class BackendParameterSharding(ParameterSharding):
    """The sharding of a table on a backend.

    Attributes:
        backend: name of the backend.
        options: the backend's options for this table.
        init_range: lowest and highest initial value; set by the sharder from the config.
        is_unique: whether a lookup with a repeated id raises; set by the sharder.
        full_name: full name of the table in the model; set by the sharder.
    """

    backend: str = ""
    options: BackendOptions = dataclasses.field(default_factory=BackendOptions)
    init_range: tuple[float, float] = (0.0, 0.0)
    is_unique: bool = False
    full_name: str = ""

    @classmethod
    def wrap(
        cls, sharding: ParameterSharding, backend: str, options: BackendOptions
    ) -> BackendParameterSharding:
        """Makes it from a sharding of TorchRec's planner."""
        stock = {
            field.name: getattr(sharding, field.name)
            for field in dataclasses.fields(ParameterSharding)
        }
        return cls(**stock, backend=backend, options=options)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Overrides TorchRec's hook: parameters that are added to the table's fused parameters."""
        return {
            _FUSED_PARAM: TableTag(
                self.backend,
                self.options,
                self.init_range,
                registry.get(self.backend).is_dense(self.options),
                self.is_unique,
                self.full_name,
                _own_dtype(self.options),
            )
        }


def _own_dtype(options: BackendOptions) -> torch.dtype | None:
    """The data type of rows that options set for every config; None if they use the config's."""
    dtypes = {options.dtype_for(dtype) for dtype in (torch.float32, torch.float16)}
    return dtypes.pop() if len(dtypes) == 1 else None


def tag_of(table: ShardedEmbeddingTable) -> TableTag | None:
    """The tag of a table on a backend; None for a stock table."""
    return (table.fused_params or {}).get(_FUSED_PARAM)


def without_tag(fused_params: Mapping[str, Any]) -> dict[str, Any]:
    """A table's fused parameters without the tag."""
    return {name: value for name, value in fused_params.items() if name != _FUSED_PARAM}
