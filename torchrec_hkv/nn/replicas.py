"""Refuses modules that train their own tables under ``DistributedDataParallel``."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def refuse_replicas(what: str, instead: str) -> None:
    """Raises if the forward of a ``DistributedDataParallel`` of several processes is running.

    Args:
        what: plural noun for the objects whose gradients ``DistributedDataParallel`` does not see.
        instead: what to do instead; ends the message.

    Raises:
        RuntimeError: such a forward is running.
    """
    # Set by DistributedDataParallel while its forward runs.
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and torch.distributed.get_world_size(active.process_group) > 1:
        raise RuntimeError(
            f"DistributedDataParallel does not keep {what} equal, because it does not see their "
            f"gradients: {instead}."
        )
