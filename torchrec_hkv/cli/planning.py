"""Plans tables for machines that need not be present."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_hkv.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec_hkv.planner.memory import ReportedPlan
from torchrec_hkv.sharding import get_default_sharders

# Unlimited memory, to find out how much tables that do not fit would take.
_ENDLESS = 1 << 60
#: Largest number of GPUs that is planned for.
MAX_GPUS = 4096


@dataclasses.dataclass(frozen=True)
class TableArgument:
    """A table to plan.

    Attributes:
        name: name of the table.
        rows: number of rows; None to take it from a replay.
        dim: number of columns.
    """

    name: str
    rows: int | None
    dim: int


@dataclasses.dataclass(frozen=True)
class Machines:
    """The machines to plan for.

    Attributes:
        gpus: number of GPUs (ranks).
        per_host: number of GPUs in a host.
        hbm: bytes of a GPU.
        host: bytes of a host.
    """

    gpus: int
    per_host: int
    hbm: int
    host: int

    def topology(self, endless: bool = False) -> Topology:
        """The machines as a TorchRec topology."""
        return Topology(
            world_size=self.gpus,
            local_world_size=min(self.gpus, self.per_host),
            compute_device="cuda",
            hbm_cap=_ENDLESS if endless else self.hbm,
            ddr_cap=_ENDLESS if endless else self.host // min(self.gpus, self.per_host),
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses TorchRec's warnings about topologies and dense models that are not present."""
    # TorchRec's warnings about data-parallel tables go to the root logger.
    loggers = [logging.getLogger("torchrec"), logging.getLogger()]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


class Planning:
    """Tables to plan for different machines."""

    def __init__(
        self,
        tables: list[TableArgument],
        optimizer: type[torch.optim.Optimizer] | None,
        constraints: dict[str, ParameterConstraints],
        sharding_types: list[str] | None,
        batch_size: int,
    ) -> None:
        self.sharding_types = list(sharding_types or ())
        self._constraints = constraints
        self._batch_size = batch_size
        self._model: nn.Module = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=table.name,
                    feature_names=[table.name],
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                )
                for table in tables
            ],
            device=torch.device("meta"),
        )
        if optimizer is not None:
            apply_optimizer_in_backward(optimizer, self._model.parameters(), {"lr": 0.01})

    def plan(self, machines: Machines, endless: bool = False) -> ReportedPlan | None:
        """A plan; None if none fits.

        Raises:
            ValueError: the backend can't serve a table.
        """
        with _quiet():
            planner = EmbeddingShardingPlanner(
                topology=machines.topology(endless),
                batch_size=self._batch_size,
                constraints=dict(self._constraints),
            )
            try:
                return planner.plan(self._model, get_default_sharders())
            except PlannerError:
                return None
            except RuntimeError as error:  # raised by TorchRec's enumerator
                if "No available sharding type" not in str(error):
                    raise
                return None

    def enough_gpus(self, machines: Machines) -> int | None:
        """The first power-of-two multiple of the GPUs that fits; None above 4,096."""
        gpus = 2 * machines.gpus
        while gpus <= MAX_GPUS:
            if self.plan(dataclasses.replace(machines, gpus=gpus)) is not None:
                return gpus
            gpus *= 2
        return None
