"""Sets the data types of tables outside of the code that defines them.

The counterpart of HybridBackend's ``emb_dtype``; equivalent to ``data_type`` in each config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_hkv import environment

Config = TypeVar("Config", bound=BaseEmbeddingConfig)

_NAMES = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}


def with_data_types(
    tables: Sequence[Config], data_type: str | Mapping[str, str] | None = None
) -> list[Config]:
    """Returns configs of tables with other data types.

    Args:
        tables: configs of tables; not modified.
        data_type: ``"fp32"``, ``"fp16"`` or ``"bf16"``, for all tables or by table. None: the
            environment variable ``TORCHREC_HKV_EMB_DTYPE``. Tables that are not named keep their
            type. The planner checks which types a kernel or backend supports.

    Raises:
        ValueError: a type is not supported, or a table does not exist.
    """
    if data_type is None:
        data_type = environment.by_table("EMB_DTYPE")
    dtypes = {"": data_type} if isinstance(data_type, str) else dict(data_type)
    unknown = sorted(set(dtypes) - {""} - {table.name for table in tables})
    if unknown:
        raise ValueError(
            f"Tables {unknown} have data types, but the tables are "
            f"{sorted(table.name for table in tables)}."
        )
    for name in dtypes.values():
        if name not in _NAMES:
            raise ValueError(f"The data type is {name!r}, but must be one of {list(_NAMES)}.")
    found = []
    for table in tables:
        name = dtypes.get(table.name, dtypes.get(""))
        changed = table if name is None else dataclasses.replace(table, data_type=_NAMES[name])
        found.append(changed)
    return found
