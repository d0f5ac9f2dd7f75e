"""Times TorchRec's own code in the stages of a step (:mod:`.stages`), on collections of small
tables.

Most of it is host time, and the speed of the host varies. Batches of all shapes therefore take
turns of a few steps, in a random order in each round, and rounds run at different times
(:meth:`StageTimer.measure` is called several times). As for lookups, non-negative constants are
fitted to the typical times by least squares of relative errors.
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
from torchrec_hkv.backends.constants import FIXED, fit_works
from torchrec_hkv.planner.stages import INPUT_DISTS, STAGES, StageTimes
from torchrec_hkv.sharding.modules.sharders import BackendEmbeddingBagCollectionSharder
from torchrec_hkv.sharding.parameter_sharding import KERNEL, BackendParameterSharding

_BACKEND = "hkv"  # any backend: the exchange is the same
_ROUNDS = 3
#: Number of timed steps of a turn, and of warm-up steps before them.
_TURN, _WARM = 3, 1
_HIDING_CYCLES = 10_000_000
_DIM, _ROWS = 128, 64
#: Number of bags in a rank's batch when the exchange of rows is timed.
_BAGS = {"cpu": 8192, "cuda": 65536}


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Shape of a batch of one rank, for tables with one feature each.

    Attributes:
        bags: number of bags of a feature.
        features: number of features.
        length: number of ids in a bag.
    """

    bags: int
    features: int = 1
    length: int = 1

    @property
    def work(self) -> dict[str, float]:
        """Amounts of work in the input distribution, without the constant part."""
        bags = float(self.features * self.bags)
        return {"feature": float(self.features), "bag": bags, "id": bags * self.length}

    def batch(self, device: torch.device) -> KeyedJaggedTensor:
        """A batch of this shape."""
        bags = self.bags * self.features
        ids = torch.arange(bags * self.length, device=device) % _ROWS
        lengths = torch.full((bags,), self.length, device=device)
        return KeyedJaggedTensor(_features(self.features), ids, lengths=lengths)


def shapes_of(bags: int, ranks: int, by_table: bool) -> dict[str, BatchShape]:
    """The timed shapes: from almost no ids to more than in most batches, with few and with many
    features and bags.

    Args:
        bags: number of bags in large batches.
        ranks: number of ranks.
        by_table: whether each table is on one rank, so that each rank needs at least one table.
    """
    few = ranks if by_table else 1
    many = max(8, 4 * few)
    return {
        "least": BatchShape(8, few),
        "several": BatchShape(8, many),
        "bags": BatchShape(bags // few, few),
        "ids": BatchShape(bags // 8 // few, few, 8),
        "both": BatchShape(bags // many, many, 2),
        "most": BatchShape(bags // many, many, 8),
    }


@contextlib.contextmanager
def stage_timers(device: torch.device) -> Iterator[dict[int, StageTimer]]:
    """Timers by number of ranks: for a single rank (on rank 0), and for all ranks.

    All ranks must call it. Without a process group, one of this process is created for its
    duration.

    Args:
        device: device of the tables.
    """
    is_alone = not dist.is_initialized()
    if is_alone:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        envs = {dist.get_world_size(): ShardingEnv.from_process_group(dist.group.WORLD)}
        if dist.get_world_size() > 1:
            # All ranks take part in creating groups; creating an environment creates one, too.
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            alone = ShardingEnv.from_process_group(groups[dist.get_rank()])
            envs = {1: alone, **envs} if dist.get_rank() == 0 else envs
        yield {ranks: StageTimer(device, env) for ranks, env in envs.items()}
    finally:
        if is_alone:
            dist.destroy_process_group()


class StageTimer:
    """Times the stages of steps on some ranks."""

    def __init__(self, device: torch.device, env: ShardingEnv) -> None:
        """
        Args:
            device: device of the tables.
            env: the ranks. All of them create a timer and call its methods.
        """
        self._device, self._env, self._ranks = device, env, env.world_size
        self._modules: dict[tuple[str, str], tuple[Any, BatchShape]] = {}
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
            rounds: number of turns of each shape.
        """
        turns, order = random.Random(len(self._times)), list(self._modules)
        for _ in range(rounds):
            turns.shuffle(order)  # in the same order on all ranks
            for key in order:
                module, shape = self._modules[key]
                for at in range(_WARM + _TURN):
                    # Each step gets a new batch, because an exchanged batch caches its counts. The
                    # other stages do not depend on the input distribution: one times them.
                    step_times = self._step(module, shape.batch(self._device), key[0] == STAGES[0])
                    if at >= _WARM:
                        self._times[key].append(step_times)

    def times(self) -> tuple[StageTimes, float | None]:
        """Milliseconds of each stage, with lookup and backward for almost no ids; and the bytes of
        rows that a rank, looking them up for all ranks, exchanges in a millisecond (None for a
        single rank)."""
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
        (minimum, few), (several, many), (bags, maximum) = (
            (took[STAGES[0], kind], self._modules[STAGES[0], kind][1])
            for kind in ("least", "several", "bags")
        )
        for at, stage in enumerate(STAGES[1:], 1):
            feature = max(several[at] - minimum[at], 0.0) / (many.features - few.features)
            stages[stage] = {"fixed": max(minimum[at] - feature, 0.0), "feature": feature}
        rows = bags[2] - minimum[2]
        if self._ranks == 1 or rows <= 0:
            return stages, None
        return stages, 4.0 * self._ranks * maximum.bags * maximum.features * _DIM / rows

    def _sharded(self, features: int, has_backends: bool, by_table: bool) -> Any:
        """A sharded collection of small tables."""
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


def input_dist_costs(shapes: Sequence[BatchShape], times: Sequence[float]) -> dict[str, float]:
    """Fits the time of an input distribution: a constant part, and a part for each feature, bag and
    id.

    Args:
        shapes: shapes of the batches.
        times: milliseconds of each batch.
    """
    found: Mapping[str, float] = fit_works([shape.work for shape in shapes], times)
    return {"fixed": found[FIXED], **{name: found[name] for name in ("feature", "bag", "id")}}


def _middle(values: Sequence[float]) -> float:
    """The mean of the values between the quartiles. If the host has two speeds, it lies between
    them, while the median is one of the two."""
    quarter = len(values) // 4
    return statistics.mean(sorted(values)[quarter : len(values) - quarter])


def _features(count: int) -> list[str]:
    return [f"f{number}" for number in range(count)]


class _Clock:
    """Milliseconds between marks; on a GPU, device time without that of the host's launches."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self._on_gpu, ranks = device.type == "cuda", dist.get_world_size(group)
        # Processor time does not include waiting for other ranks.
        one = torch.get_num_threads() == 1 and ranks == 1
        self._now = time.process_time if one else time.perf_counter
        self._marks: list[Any] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda._sleep(_HIDING_CYCLES)
        if ranks > 1:
            # All ranks start together, on a GPU in device time. Otherwise the wait of the first
            # rank would be counted as the exchange.
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
