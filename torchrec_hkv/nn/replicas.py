"""Modules that train by themselves, under ``DistributedDataParallel``."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def refuse_replicas(what: str, instead: str) -> None:
    """Refuses a training forward inside of a ``DistributedDataParallel`` of several processes.

    Args:
        what: whose gradients it does not add up, in the plural.
        instead: what to do, after a colon.

    Raises:
        RuntimeError: the forward of such a module runs.
    """
    # Set by DistributedDataParallel while its forward runs.
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and torch.distributed.get_world_size(active.process_group) > 1:
        raise RuntimeError(
            f"DistributedDataParallel does not keep {what} equal, because it does not see their "
            f"gradients: {instead}."
        )
