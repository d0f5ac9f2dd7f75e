"""Saves and loads the hash tables of a module in its ``state_dict``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.eviction import EPOCH_POLICIES, name_of
from torchrec_hkv.nn.arguments import check_tensor
from torchrec_hkv.nn.contents import Contents
from torchrec_hkv.nn.table_plan import Plan
from torchrec_hkv.nn.tables import Progress, Tables

# Fields of a table's contents in a module's state_dict. States are in the optimizer's state_dict.
_SAVED = ("ids", "rows", "last_steps", "scores")


def _has_epochs(plan: Plan) -> bool:
    return plan.eviction in EPOCH_POLICIES


def _ages(plan: Plan) -> bool:
    return name_of(plan.eviction) == "aged_lfu"


def saved_names(plan: Plan, prefixes: Sequence[str]) -> list[str]:
    """Names of the tensors that a ``state_dict`` holds.

    Args:
        plan: the plan of the tables.
        prefixes: prefix of each table's names.
    """
    names = ["seed", "clock", *(prefix + name for prefix in prefixes for name in _SAVED)]
    names += ["epoch"] if _has_epochs(plan) else []
    names += [prefix + "aging" for prefix in prefixes if _ages(plan)]
    return names


def saved_state(tables: Tables, prefixes: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a ``state_dict``, by the names that :func:`saved_names` returns."""
    progress = Progress.read(tables.group)
    state = {"seed": torch.tensor(tables.plan.seed), "clock": torch.tensor(progress.clock)}
    if _has_epochs(tables.plan):
        state["epoch"] = torch.tensor(progress.epoch)
    for prefix, measured in zip(prefixes, progress.aging, strict=True):
        if measured is not None:
            state[prefix + "aging"] = torch.tensor(measured, dtype=torch.float64)
    for prefix, contents in zip(prefixes, tables.contents(), strict=True):
        for name in _SAVED:
            state[prefix + name] = getattr(contents, name)
    return state


def load_state(tables: Tables, prefixes: Sequence[str], saved: Mapping[str, Tensor]) -> None:
    """Replaces the contents of tables; ids that stay keep their optimizer states.

    Args:
        tables: the tables.
        prefixes: prefix of each table's names.
        saved: the result of :func:`saved_state` of tables with the same plan.

    Raises:
        ValueError: a tensor has another dtype or shape, or an id occurs twice.
    """
    plan = tables.plan
    loaded = [
        _checked_contents(plan, prefix, saved).with_states(here.ids, here.states)
        for prefix, here in zip(prefixes, tables.contents(), strict=True)
    ]
    for name in ("seed", "clock", *(["epoch"] if _has_epochs(plan) else [])):
        check_tensor(name, saved[name], torch.int64, ())
    aging: list[tuple[float, float, float] | None] = []
    for prefix in prefixes:
        if _ages(plan):
            check_tensor(prefix + "aging", saved[prefix + "aging"], torch.float64, (3,))
        aging.append(tuple(saved[prefix + "aging"].tolist()) if _ages(plan) else None)
    epoch = int(saved["epoch"]) if _has_epochs(plan) else 0
    progress = Progress(int(saved["clock"]), epoch, tuple(aging))
    tables.replace(dataclasses.replace(plan, seed=int(saved["seed"])), loaded, progress)


def _checked_contents(plan: Plan, prefix: str, saved: Mapping[str, Tensor]) -> Contents:
    tensors = {name: saved[prefix + name] for name in _SAVED}
    n = tensors["ids"].shape[0] if tensors["ids"].dim() else 0
    keeps_scores = plan.eviction != "lru"
    check_tensor(prefix + "ids", tensors["ids"], torch.int64, (n,))
    check_tensor(prefix + "rows", tensors["rows"], torch.float32, (n, plan.dim))
    check_tensor(prefix + "last_steps", tensors["last_steps"], torch.int32, (n,))
    check_tensor(prefix + "scores", tensors["scores"], torch.int64, (n if keeps_scores else 0,))
    if tensors["ids"].unique().numel() != n:
        raise ValueError(f"{prefix}ids hold an id more than once.")
    return Contents(**{k: v.cpu() for k, v in tensors.items()}, states=torch.zeros(n, 0))
