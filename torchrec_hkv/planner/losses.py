"""Estimates from curves how much quality a table loses with an option."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_configs import data_type_to_dtype

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import Kept
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.planner.options import BackendShardingOption, config_of, is_backend_option
from torchrec_hkv.planner.quality_curve import MEASURED, QualityCurve
from torchrec_hkv.sharding.tables import config_shards


@dataclasses.dataclass(frozen=True)
class TableLoss:
    """The loss of a table.

    Attributes:
        value: estimated loss, in the unit of the curves.
        parts: what is given up; empty without loss.
    """

    value: float = 0.0
    parts: tuple[Kept, ...] = ()

    @property
    def is_lossy(self) -> bool:
        """Whether anything is given up, however little."""
        return bool(self.parts)

    def __str__(self) -> str:
        return "; ".join(part.text for part in self.parts)


NO_LOSS = TableLoss()


def loss_of(
    option: ShardingOption,
    frequencies: IdFrequencies | None = None,
    curves: Mapping[str, QualityCurve] | None = None,
) -> TableLoss:
    """The loss of a table with an option.

    Args:
        option: the option. Options on stock kernels have no loss.
        frequencies: frequencies of the table's ids.
        curves: quality curves by kind that replace the built-in ones.
    """
    if not is_backend_option(option):
        return NO_LOSS
    parts = tuple(_kept_quality(option, frequencies))
    all_curves = {**MEASURED, **(curves or {})}
    return TableLoss(sum(all_curves[part.kind].loss(part.share) for part in parts), parts)


def _kept_quality(
    option: BackendShardingOption, frequencies: IdFrequencies | None
) -> Sequence[Kept]:
    config = config_of(option)
    full_size = [[config.num_embeddings, config.embedding_dim]]
    (table,) = config_shards(config, None, full_size, [[0, 0]], option.backend_options)
    dtype = data_type_to_dtype(config.data_type)
    return registry.get(option.backend).kept(table, config.num_embeddings, dtype, frequencies)
