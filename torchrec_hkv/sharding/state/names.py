"""Full names of tables: their keys in a model's ``state_dict`` without ``.weight``.

Two collections of a model may have tables of the same name. Results are therefore keyed by full
names. Functions that take the name of a table also accept its own name if no other table has it
(:func:`torchrec_hkv.table_names.find_name`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_hkv.sharding.modules.collection import BackendCollection, ShardedTable

# Prefix of keys under DistributedDataParallel, which DistributedModelParallel removes once.
_WRAPPED = "module"


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model with the prefix of their keys in its ``state_dict``.

    Like ``model.named_modules()``, but wrappers that do not appear in a ``state_dict``
    (``DistributedModelParallel``, its wrappers of dense parameters, and
    ``FullyShardedDataParallel``) do not appear in paths.

    Args:
        model: a model, sharded or not.

    Yields:
        Path, ``""`` for the model itself, and module. Each module is yielded once.
    """
    yield from _walk("", model, set())


def _walk(path: str, module: nn.Module, visited: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in visited:
        return
    visited.add(id(module))
    if isinstance(module, DistributedModelParallel):
        for child in module.children():
            for below, found in _walk("", child, visited):
                first, _, rest = below.partition(".")
                yield joined(path, rest if first == _WRAPPED else below), found
        return
    yield path, module
    for name, child in module.named_children():
        is_wrapper = isinstance(module, FullyShardedDataParallel)
        yield from _walk(path if is_wrapper else joined(path, name), child, visited)


def named_collections(model: nn.Module) -> Iterator[tuple[str, BackendCollection]]:
    """The sharded collections of a model with the prefix of the full names of their tables.

    Args:
        model: the sharded model.

    Yields:
        The prefix, such as ``"ebc.embedding_bags"``, and the collection.
    """
    for path, module in named_modules(model):
        if isinstance(module, BackendCollection):
            yield joined(path, module.tables_attribute), module


def named_tables(model: nn.Module) -> dict[str, ShardedTable]:
    """The tables on backends of a model by full name, on all ranks.

    Args:
        model: the sharded model.
    """
    return {
        joined(prefix, name): table
        for prefix, collection in named_collections(model)
        for name, table in collection.sharded_tables().items()
    }


def joined(path: str, name: str) -> str:
    """Joins two parts of a key in a ``state_dict``; either may be empty."""
    return ".".join(filter(None, (path, name)))
