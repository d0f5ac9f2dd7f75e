"""Saving and loading a sharded model, so that a killed save never costs the last good one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)

from torchrec_hkv.collective import on_leader
from torchrec_hkv.sharding.state import SHARDS_KEY

# What torch.distributed.checkpoint writes last.
_METADATA_FILE = ".metadata"

_SHARDS_PATTERN = re.compile(rf"\.(?:embedding_bags|embeddings)\.(?P<table>.+)\.{SHARDS_KEY}$")


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: KeyedOptimizer | None = None
) -> None:
    """Saves a model, and an optimizer, from all ranks; a collective call.

    The rows of tables on backends are saved with their optimizer states, which are part of the
    model's state. Everything is written to a folder beside ``path`` and renamed when it is whole.

    Args:
        path: a folder that all ranks see; an earlier checkpoint there is replaced.
        model: sharded.
        optimizer: TorchRec's, of dense parameters and stock tables.

    Raises:
        ValueError: ``path`` is something else than a checkpoint, or the optimizer is not keyed.
        CheckpointException: a rank could not write.
    """
    _check_optimizer(optimizer)
    place = _Place(Path(path))
    on_leader(place.prepare)
    dcp.save(_state(model, optimizer), checkpoint_id=place.saving)
    if dist.is_initialized():
        dist.barrier()
    on_leader(place.commit)


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: KeyedOptimizer | None = None
) -> None:
    """Loads what :func:`save` wrote, at the same world size; a collective call.

    Args:
        path: as it was saved to.
        model: sharded as the saved one was.
        optimizer: of the same parameters as the saved one; fresh, or after some steps.

    Raises:
        ValueError: there is no checkpoint, or it doesn't match the model, the optimizer or the
            world size; nothing has changed then.
    """
    _check_optimizer(optimizer)
    folder = _Place(Path(path)).newest()
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state = _state(model, None)
    _check_match(folder, metadata, _flat("model", state["model"]))
    if optimizer is not None:
        _check_has_optimizer(folder, metadata)
        _initialise(optimizer)
        state.update(_optimizer_state(optimizer))
        _check_match(folder, metadata, _flat("optimizer", state.get("optimizer", {})))
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    if optimizer is not None and "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])


class _Place:
    """A checkpoint's folder and its siblings: what is being saved, and what was there before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saving = path.with_name(f".{path.name}.saving")
        self.previous = path.with_name(f".{path.name}.previous")

    def prepare(self) -> None:
        """Clears what a killed save left."""
        if self.path.exists() and not (self.path / _METADATA_FILE).is_file():
            raise ValueError(
                f"{self.path} is not a checkpoint and would be replaced by one: name a folder that "
                "doesn't exist, or an earlier checkpoint."
            )
        shutil.rmtree(self.saving, ignore_errors=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def commit(self) -> None:
        """Puts what was saved in its place. At every moment a whole checkpoint is found."""
        if self.path.exists():
            shutil.rmtree(self.previous, ignore_errors=True)
            self.path.rename(self.previous)
        self.saving.rename(self.path)
        shutil.rmtree(self.previous, ignore_errors=True)

    def newest(self) -> Path:
        """The last whole checkpoint: a save may have been killed between its two renames."""
        for folder in (self.path, self.previous):
            if (folder / _METADATA_FILE).is_file():
                return folder
        raise ValueError(f"There is no checkpoint at {self.path}: name a folder that save wrote.")


def _state(model: nn.Module, optimizer: KeyedOptimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state.update(_optimizer_state(optimizer))
    return state


def _optimizer_state(optimizer: KeyedOptimizer) -> dict[str, Any]:
    """Nothing on a rank that holds none of the parameters: an empty state would be missed."""
    state = optimizer.state_dict()
    return {"optimizer": state} if _flat("optimizer", state) else {}


def _check_optimizer(optimizer: KeyedOptimizer | None) -> None:
    if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
        raise ValueError(
            f"The optimizer is a {type(optimizer).__name__}: it must be a KeyedOptimizer of "
            "TorchRec's, such as KeyedOptimizerWrapper or CombinedOptimizer."
        )


def _check_match(folder: Path, metadata: Metadata, wanted: Mapping[str, Any]) -> None:
    saved = metadata.state_dict_metadata
    missing = [key for key in wanted if key not in saved]
    if missing:
        raise ValueError(
            f"The checkpoint {folder} lacks {len(missing)} of the tensors to load, the first being "
            f"{missing[0]!r}: load it into what it was saved from."
        )
    # World sizes first: at another one most shapes differ too.
    for key in sorted(wanted, key=lambda key: _SHARDS_PATTERN.search(key) is None):
        entry, value = saved[key], wanted[key]
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(value, torch.Tensor):
            continue
        if entry.size == value.size():
            continue
        table = _SHARDS_PATTERN.search(key)
        if table is not None:
            raise ValueError(
                f"The checkpoint {folder} holds table {table['table']!r} in {entry.size[0]} shards "
                f"and the model has {value.size()[0]}: load it with the number of ranks and the "
                "sharding type it was saved with."
            )
        raise ValueError(
            f"In the checkpoint {folder}, {key!r} has shape {tuple(entry.size)} and here "
            f"{tuple(value.size())}: load it into what it was saved from."
        )


def _check_has_optimizer(folder: Path, metadata: Metadata) -> None:
    if not any(key.startswith("optimizer.") for key in metadata.state_dict_metadata):
        raise ValueError(
            f"The checkpoint {folder} was saved without an optimizer: load it without one."
        )


def _initialise(optimizer: KeyedOptimizer) -> None:
    """Makes the lazy states of dense optimizers, which TorchRec loads in place."""
    for leaf in _leaves(optimizer):
        if isinstance(leaf, KeyedOptimizerWrapper) and not leaf.state:
            before = [parameter.detach().clone() for parameter in leaf.params.values()]
            leaf.init_state()  # a step on zero gradients, in which weight decay would count
            leaf.zero_grad()
            for parameter, value in zip(leaf.params.values(), before, strict=True):
                parameter.detach().copy_(value)


def _flat(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested mappings, by their path."""
    leaves: dict[str, Any] = {}
    for key, value in state.items():
        path = f"{prefix}.{key}"
        leaves.update(_flat(path, value) if isinstance(value, Mapping) else {path: value})
    return leaves


def _leaves(optimizer: KeyedOptimizer) -> Iterator[KeyedOptimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _leaves(part)
    elif isinstance(optimizer, OptimizerWrapper):
        yield from _leaves(optimizer._optimizer)
    else:
        yield optimizer
