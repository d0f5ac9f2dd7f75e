"""Runs work on one rank or on all ranks, and returns the result, or the error, on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An error in a form that can be pickled, which exceptions may not be."""

    type_name: str
    message: str
    planner_error_type: PlannerErrorType | None

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        return cls(type(error).__name__, str(error), getattr(error, "error_type", None))

    def as_exception(self, rank: int = 0) -> Exception:
        if self.planner_error_type is not None:
            return PlannerError(self.message, self.planner_error_type)
        if self.type_name == "ValueError":
            return ValueError(self.message)
        return RuntimeError(f"{self.type_name} on rank {rank}: {self.message}")


def on_leader(work: Callable[[], T], pg: dist.ProcessGroup | None = None) -> T:
    """Runs a function on rank 0 and returns its result on every rank.

    Args:
        work: function to call on rank 0; its result must be picklable.
        pg: the ranks; None for all, or for this process if there is no process group.

    Raises:
        Exception: the error of ``work``, on every rank, so that no rank waits forever.
    """
    if not dist.is_initialized():
        return work()
    pg = dist.group.WORLD if pg is None else pg
    outcome: list[T | _Failure | None] = [None]
    error: Exception | None = None
    if dist.get_rank(pg) == 0:
        try:
            outcome = [work()]
        except Exception as raised:  # any error; it is raised again below, on all ranks
            error = raised
            outcome = [_Failure.of(raised)]
    if dist.get_world_size(pg) > 1:
        dist.broadcast_object_list(outcome, group=pg, group_src=0)
    if error is not None:
        raise error
    if isinstance(outcome[0], _Failure):
        raise outcome[0].as_exception()
    return outcome[0]


def on_every_rank(work: Callable[[], T], pg: dist.ProcessGroup | None = None) -> list[T]:
    """Runs a function on every rank and returns all results on every rank.

    Args:
        work: function to call; its result must be picklable.
        pg: the ranks; None for all, or for this process if there is no process group.

    Returns:
        The results, by rank.

    Raises:
        Exception: the error of ``work`` on the lowest rank with an error, on every rank, so that no
            rank waits forever.
    """
    if not dist.is_initialized():
        return [work()]
    pg = dist.group.WORLD if pg is None else pg
    error: Exception | None = None
    try:
        outcome: T | _Failure = work()
    except Exception as raised:  # any error; it is raised again below, on all ranks
        error = raised
        outcome = _Failure.of(raised)
    outcomes: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(outcomes, outcome, group=pg)
    failures = [(rank, o) for rank, o in enumerate(outcomes) if isinstance(o, _Failure)]
    if not failures:
        return outcomes
    if failures[0][0] == dist.get_rank(pg) and error is not None:
        raise error
    raise failures[0][1].as_exception(failures[0][0])


def this_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share_of_rank(items: list[T]) -> list[T]:
    """This rank's share of items that the ranks process together."""
    return items[this_rank() :: world_size()]
