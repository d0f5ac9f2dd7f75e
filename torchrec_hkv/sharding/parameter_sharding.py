"""How a plan says which backend serves a table, and with which options.

TorchRec has one placeholder for compute kernels from outside, ``customized_kernel``, and its enum
can't be extended. Every backend shares it; what tells them apart travels with the plan here.
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

#: The compute kernel that TorchRec sees for a table of any backend.
KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value

_FUSED_PARAM = "torchrec_hkv"


@dataclasses.dataclass(frozen=True)
class TableTag:
    """What a table's fused parameters carry from the plan to the kernel.

    TorchRec groups tables whose fused parameters are equal. Only the backend counts there, and
    whether rows lie open: other tables of one backend are looked up together whatever their
    options, which each keeps for itself.

    Attributes:
        backend: name of the backend.
        options: its options for this table.
        init_range: lowest and highest initial value.
        is_dense: whether its rows lie open by number (:meth:`Backend.is_dense`).
        row_dtype: of its rows, where that is not the config's: a group has one.
        is_unique: whether a lookup that has an id twice is refused.
        full_name: the table's in the model (:mod:`torchrec_hkv.sharding.state.names`).
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
    """The sharding of a table that a backend serves.

    Attributes:
        backend: name of the backend.
        options: its options for this table.
        init_range: lowest and highest initial value; the sharder fills it in from the config.
        is_unique: whether a lookup that has an id twice is refused; the sharder fills it in.
        full_name: the table's in the model; the sharder fills it in.
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
        """The sharding that TorchRec's planner made, for a backend."""
        stock = {
            field.name: getattr(sharding, field.name)
            for field in dataclasses.fields(ParameterSharding)
        }
        return cls(**stock, backend=backend, options=options)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """TorchRec's hook: merged into the table's fused parameters."""
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
    """The data type of rows that options say whatever the config says; None: the config's."""
    told = {options.dtype_for(dtype) for dtype in (torch.float32, torch.float16)}
    return told.pop() if len(told) == 1 else None


def tag_of(table: ShardedEmbeddingTable) -> TableTag | None:
    """The tag of a table of ours, None for a stock table."""
    return (table.fused_params or {}).get(_FUSED_PARAM)


def without_tag(fused_params: Mapping[str, Any]) -> dict[str, Any]:
    """A table's fused parameters as they were before the tag joined them."""
    return {name: value for name, value in fused_params.items() if name != _FUSED_PARAM}
