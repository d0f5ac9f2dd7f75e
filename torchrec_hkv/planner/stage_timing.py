"""Times what TorchRec's own code takes in the parts of a step (:mod:`.stages`), on collections of
small tables.

Most of it is the time of the host, which is faster at some times than at others. So all shapes of
batches take turns of a few steps, in an order that is drawn anew for each round, and rounds are run
at different times (:meth:`StageTimer.measure` is called several times). Constants are fitted to
what is typical of all of them, by relative errors and none below zero, as those of lookups are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.constants import FIXED, fitted
from torchrec_hkv.planner.stages import INPUT_DISTS, STAGES, StageTimes
from torchrec_hkv.sharding.modules.sharders import BackendEmbeddingBagCollectionSharder
from torchrec_hkv.sharding.parameter_sharding import KERNEL, BackendParameterSharding

_BACKEND = "hkv"  # whichever: the exchange is the same
_ROUNDS = 3
#: Steps of a turn that are timed, and those before them, for caches.
_TURN, _WARM = 3, 1
_HIDING_CYCLES = 10_000_000
_DIM, _ROWS = 128, 64
#: Bags of a rank's batch, where the exchange of rows is timed.
_BAGS = {"cpu": 8192, "cuda": 65536}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a batch of one rank, of tables with a feature each.

    Attributes:
        bags: of a feature.
        features: their number.
        length: ids of a bag.
    """

    bags: int
    features: int = 1
    length: int = 1

    @property
    def work(self) -> dict[str, float]:
        """Counts of what the exchange of ids does, but what is done once."""
        bags = float(self.features * self.bags)
        return {"feature": float(self.features), "bag": bags, "id": bags * self.length}

    def batch(self, device: torch.device) -> KeyedJaggedTensor:
        """One of these."""
        bags = self.bags * self.features
        ids = torch.arange(bags * self.length, device=device) % _ROWS
        lengths = torch.full((bags,), self.length, device=device)
        return KeyedJaggedTensor(_features(self.features), ids, lengths=lengths)


def shapes_of(bags: int, ranks: int, by_table: bool) -> dict[str, Shape]:
    """The shapes that are timed: from next to no ids to more than most batches have, in few and in
    many features and bags.

    Args:
        bags: of the batch with many.
        ranks: how many there are.
        by_table: whether tables stay whole; each rank has one at least then.
    """
    few = ranks if by_table else 1
    many = max(8, 4 * few)
    return {
        "least": Shape(8, few),
        "several": Shape(8, many),
        "bags": Shape(bags // few, few),
        "ids": Shape(bags // 8 // few, few, 8),
        "both": Shape(bags // many, many, 2),
        "most": Shape(bags // many, many, 8),
    }


@contextlib.contextmanager
def stage_timers(device: torch.device) -> Iterator[dict[int, StageTimer]]:
    """Timers by numbers of ranks: of one rank alone (on rank 0), and of all there are.

    All ranks call it. Where no process group is there, one of this process is made, and ended.

    Args:
        device: of the tables.
    """
    is_alone = not dist.is_initialized()
    if is_alone:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        envs = {dist.get_world_size(): ShardingEnv.from_process_group(dist.group.WORLD)}
        if dist.get_world_size() > 1:
            # All ranks take part in the making of groups, of which an environment makes one, too.
            own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            alone = ShardingEnv.from_process_group(own[dist.get_rank()])
            envs = {1: alone, **envs} if dist.get_rank() == 0 else envs
        yield {ranks: StageTimer(device, env) for ranks, env in envs.items()}
    finally:
        if is_alone:
            dist.destroy_process_group()


class StageTimer:
    """Times the parts of steps on some ranks."""

    def __init__(self, device: torch.device, env: ShardingEnv) -> None:
        """
        Args:
            device: of the tables.
            env: of the ranks; all of them make one and call its methods.
        """
        self._device, self._env, self._ranks = device, env, env.world_size
        self._modules: dict[tuple[str, str], tuple[Any, Shape]] = {}
        for (has_backends, by_table), name in INPUT_DISTS.items():
            shapes = shapes_of(_BAGS[device.type], self._ranks, by_table)
            modules = {
                features: self._sharded(features, has_backends, by_table)
                for features in {shape.features for shape in shapes.values()}
            }
            for kind, shape in shapes.items():
                self._modules[name, kind] = (modules[shape.features], shape)
        self._times: dict[tuple[str, str], list[list[float]]] = {key: [] for key in self._modules}

    def measure(self, rounds: int = _ROUNDS) -> None:
        """Times all shapes in turn.

        Args:
            rounds: so many turns of each.
        """
        turns, order = random.Random(len(self._times)), list(self._modules)
        for _ in range(rounds):
            turns.shuffle(order)  # on all ranks alike
            for key in order:
                module, shape = self._modules[key]
                for at in range(_WARM + _TURN):
                    # A batch of its own for each step: one that was exchanged knows its counts.
                    # What follows the exchange of ids is the same whichever that is.
                    took = self._step(module, shape.batch(self._device), key[0] == STAGES[0])
                    if at >= _WARM:
                        self._times[key].append(took)

    def times(self) -> tuple[StageTimes, float | None]:
        """Milliseconds of each part, those of lookup and backward with next to no ids; and bytes a
        millisecond of exchanged rows, of those that a rank looks up for all, None on one rank."""
        typical = _middle if self._device.type == "cuda" else min
        took = {
            key: [typical(parts) for parts in zip(*steps, strict=True)]
            for key, steps in self._times.items()
        }
        stages: StageTimes = {
            name: input_dist_costs(
                [self._modules[name, kind][1] for kind in kinds],
                [took[name, kind][0] for kind in kinds],
            )
            for name in INPUT_DISTS.values()
            for kinds in [[kind for of, kind in took if of == name]]
        }
        (least, few), (several, many), (bags, most) = (
            (took[STAGES[0], kind], self._modules[STAGES[0], kind][1])
            for kind in ("least", "several", "bags")
        )
        for at, stage in enumerate(STAGES[1:], 1):
            feature = max(several[at] - least[at], 0.0) / (many.features - few.features)
            stages[stage] = {"fixed": max(least[at] - feature, 0.0), "feature": feature}
        rows = bags[2] - least[2]
        if self._ranks == 1 or rows <= 0:
            return stages, None
        return stages, 4.0 * self._ranks * most.bags * most.features * _DIM / rows

    def _sharded(self, features: int, has_backends: bool, by_table: bool) -> Any:
        """A collection of small tables."""
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", feature_names=[name], embedding_dim=_DIM, num_embeddings=_ROWS
            )
            for name in _features(features)
        ]
        model = EmbeddingBagCollection(tables, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.0})
        sharder = BackendEmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            model,
            {
                table.name: table_wise(rank=at % self._ranks) if by_table else row_wise()
                for at, table in enumerate(tables)
            },
            sharder,
            local_size=self._ranks,
            world_size=self._ranks,
            device_type=self._device.type,
        )
        if has_backends:
            options = registry.get(_BACKEND).options_type()
            for name in list(plan):
                plan[name] = BackendParameterSharding.wrap(plan[name], _BACKEND, options)
                plan[name].compute_kernel = KERNEL
        return DistributedModelParallel(
            model,
            env=self._env,
            device=self._device,
            plan=ShardingPlan({"": plan}),
            sharders=[sharder],
        ).module

    def _step(self, module: Any, features: KeyedJaggedTensor, is_whole: bool) -> list[float]:
        context = module.create_context()
        clock = _Clock(self._device, self._env.process_group)
        received = module.input_dist(context, features).wait().wait()
        (first,) = clock.stop()
        if not is_whole:
            return [first]
        clock = _Clock(self._device, self._env.process_group)
        rows = module.compute(context, received)
        clock.mark()
        pooled = module.output_dist(context, rows).wait().values()
        clock.mark()
        pooled.backward(torch.ones_like(pooled))
        return [first, *clock.stop()]


def input_dist_costs(shapes: Sequence[Shape], times: Sequence[float]) -> dict[str, float]:
    """What an exchange of ids takes once, for a feature, a bag and an id.

    Args:
        shapes: of batches.
        times: milliseconds of each.
    """
    found: Mapping[str, float] = fitted([shape.work for shape in shapes], times)
    return {"fixed": found[FIXED], **{name: found[name] for name in ("feature", "bag", "id")}}


def _middle(values: Sequence[float]) -> float:
    """The mean of those between the quartiles: of a host with two speeds one that lies between
    them, where a median would be one of the two."""
    quarter = len(values) // 4
    return statistics.mean(sorted(values)[quarter : len(values) - quarter])


def _features(count: int) -> list[str]:
    return [f"f{number}" for number in range(count)]


class _Clock:
    """Milliseconds between marks. On a GPU the device's: what the host does is hidden."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self._on_gpu, ranks = device.type == "cuda", dist.get_world_size(group)
        # Processor time does not see a wait for other ranks.
        one = torch.get_num_threads() == 1 and ranks == 1
        self._now = time.process_time if one else time.perf_counter
        self._marks: list[Any] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda._sleep(_HIDING_CYCLES)
        if ranks > 1:
            # All ranks begin together, on a GPU as the device sees it: else the one that is ahead
            # would wait in the exchange, and its time would be said to be the exchange's.
            dist.all_reduce(torch.ones(1, device=device), group=group)
        self.mark()

    def mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(self._now())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def stop(self) -> list[float]:
        self.mark()
        pairs = list(zip(self._marks[:-1], self._marks[1:], strict=True))
        if not self._on_gpu:
            return [1e3 * (end - begin) for begin, end in pairs]
        self._marks[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]
