"""Converts dense tables of a trained model to Tensor-Train tables of another model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from click_data import DataError
from torch import nn
from torchrec.distributed.types import ShardedTensor

from torchrec_hkv import TTOptions
from torchrec_hkv.tensor_train import Decomposition, tt_svd


@dataclasses.dataclass(frozen=True)
class Compressed:
    """The cores of a table.

    Attributes:
        decomposition: the decomposition, with cores in host memory.
        dense_bytes: bytes of the dense table.
    """

    decomposition: Decomposition
    dense_bytes: int

    @property
    def tt_bytes(self) -> int:
        """Returns the bytes of the cores."""
        return sum(core.nbytes for core in self.decomposition.cores)

    @property
    def options(self) -> TTOptions:
        """Returns the options of a table of this shape."""
        shape = self.decomposition.shape
        return TTOptions(ranks=shape.ranks, p=shape.p, q=shape.q)


def key_of(names: Iterable[str], table: str, tensor: str = "weight") -> str:
    """Returns the name of a table's tensor in a state dict."""
    (key,) = (name for name in names if name.endswith(f"embedding_bags.{table}.{tensor}"))
    return key


def local_tensors(tensor: torch.Tensor | ShardedTensor) -> list[torch.Tensor]:
    """Returns this rank's parts of a tensor of a state dict."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def whole(tensor: ShardedTensor) -> torch.Tensor:
    """Gathers the rows of all ranks on all ranks."""
    shards = tensor.local_shards()
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    rows = torch.zeros(tensor.size(), device=device)
    for shard in shards:
        start = shard.metadata.shard_offsets[0]
        rows[start : start + len(shard.tensor)] = shard.tensor
    dist.all_reduce(rows)
    return rows


@torch.no_grad()
def compress(
    model: nn.Module, tables: list[str], rank: int | None, error: float | None
) -> dict[str, Compressed]:
    """Computes cores for dense tables, the same on all ranks.

    Args:
        model: a sharded model with stock tables.
        tables: names of the tables.
        rank: ranks between cores, lowered if a table does not need them; None if `error` is given.
        error: relative error of each table; None if `rank` is given.

    Raises:
        DataError: there are no such tables.
    """
    if not tables:
        raise DataError("The log has no column of many ids, whose table could be compressed.")
    state = model.state_dict()
    result: list[dict[str, Compressed]] = [{}]
    for table in tables:
        rows = whole(state[key_of(state, table)])
        if dist.get_rank() == 0:
            decomposition = tt_svd(rows, ranks=rank, max_error=error)
            decomposition = dataclasses.replace(
                decomposition, cores=[core.cpu() for core in decomposition.cores]
            )
            result[0][table] = Compressed(decomposition, rows.nbytes)
    # One rank sends the result to all, because all must agree on the shapes.
    dist.broadcast_object_list(result, src=0)
    return result[0]


@torch.no_grad()
def move_over(source: nn.Module, target: nn.Module, parts: Mapping[str, Compressed]) -> None:
    """Copies the parameters of a model to another model, with cores instead of some tables.

    Args:
        source: model with stock tables.
        target: model with Tensor-Train tables where ``parts`` has cores.
        parts: cores by table.
    """
    known, state = source.state_dict(), target.state_dict()
    for key, tensor in state.items():
        if not isinstance(tensor, ShardedTensor):
            tensor.copy_(known[key])
        elif key in known:
            rows = whole(known[key])
            for shard in tensor.local_shards():
                start = shard.metadata.shard_offsets[0]
                shard.tensor.copy_(rows[start : start + len(shard.tensor)])
    for table, part in parts.items():
        for number, core in enumerate(part.decomposition.cores):
            for shard in state[key_of(state, table, f"tt_core_{number}")].local_shards():
                shard.tensor.copy_(core)
    target.load_state_dict(state)
