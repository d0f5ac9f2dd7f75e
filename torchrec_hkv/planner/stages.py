"""What TorchRec's own code takes in the parts of a step, whatever is looked up."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_hkv.backends import registry
from torchrec_hkv.sharding.parameter_sharding import KERNEL, BackendParameterSharding
from torchrec_hkv.sharding.sharders import BackendEmbeddingBagCollectionSharder

#: Parts of a step of a sharded collection.
STAGES = ("input_dist", "forward", "output_dist", "backward")
#: The first part, over several ranks, where backends serve tables: they have an exchange of their
#: own (:class:`torchrec_hkv.sharding.all_to_all.CountedAllToAll`).
BACKEND_INPUT_DIST = "input_dist_of_backends"
_BACKEND = "hkv"  # whichever: the exchange is the same
_WARM, _STEPS = 5, 21
_HIDING_CYCLES = 10_000_000
_DIM, _ROWS, _FEATURES, _LENGTH = 128, 64, 8, 8
#: Of a rank, where the exchange of rows is timed.
_BAGS = {"cpu": 8192, "cuda": 65536}


#: Milliseconds by stage: once (``fixed``), for a feature, a bag and an id of a rank's batch.
StageTimes = dict[str, dict[str, float]]


def step_parts(
    stages: StageTimes, features: int, bags: float, ids: float, has_backends: bool = False
) -> dict[str, float]:
    """Milliseconds that TorchRec's own code takes in the parts of a step.

    Args:
        stages: as :func:`stage_times` gives them; empty for zeros.
        features: of the collection.
        bags: of a rank's batch, over all features.
        ids: of a rank's batch.
        has_backends: whether backends serve tables of the collection.
    """
    counts = {"fixed": 1.0, "feature": float(features), "bag": bags, "id": ids}
    costs = {stage: stages.get(stage, {}) for stage in STAGES}
    if has_backends:
        costs["input_dist"] = stages.get(BACKEND_INPUT_DIST, costs["input_dist"])
    return {
        stage: sum(cost * counts[name] for name, cost in parts.items())
        for stage, parts in costs.items()
    }


def stage_times(device: torch.device) -> tuple[StageTimes, float | None]:
    """What TorchRec's code takes in the parts of a step, and how fast rows are exchanged.

    With a process group of several ranks all of them call it, and exchanges are among the parts.

    Args:
        device: of the table. Where no process group is there, one of this process is made, and
            ended.

    Returns:
        Milliseconds of each part: once, for each feature, of the input exchange also for each bag
        and id; lookup and backward are those of next to no ids. Over several ranks also those of
        the exchange that backends have (:data:`BACKEND_INPUT_DIST`). And bytes a millisecond of
        exchanged rows, of those that a rank looks up for all; None on one rank.
    """
    is_alone = not dist.is_initialized()
    if is_alone:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        bags, ranks = _BAGS[device.type], dist.get_world_size()
        times, took = _costs(device, bags)
        if ranks > 1:
            of_backends, _ = _costs(device, bags, _BACKEND)
            times[BACKEND_INPUT_DIST] = of_backends["input_dist"]
        return times, 4.0 * ranks * bags * _DIM / took if ranks > 1 and took > 0 else None
    finally:
        if is_alone:
            dist.destroy_process_group()


def _costs(device: torch.device, bags: int, backend: str | None = None) -> tuple[StageTimes, float]:
    """Milliseconds of each part, and those of the outputs' exchange that are its rows'."""
    shapes = {
        "least": _Shape(8),
        "several": _Shape(8, features=_FEATURES),
        "many": _Shape(bags),
        "longer": _Shape(bags // _LENGTH, length=_LENGTH),
    }
    took = _measured(device, shapes, backend)
    least, several, many, longer = took.values()
    times: StageTimes = {}
    for stage in STAGES:
        feature = max(several[stage] - least[stage], 0.0) / (_FEATURES - 1)
        times[stage] = {"fixed": max(least[stage] - feature, 0.0), "feature": feature}
    # As many ids in fewer bags: the difference is that of the bags.
    by_bags = max(many["input_dist"] - longer["input_dist"], 0.0)
    bag = by_bags / (bags - bags // _LENGTH)
    both = max(many["input_dist"] - least["input_dist"], 0.0) / bags
    times["input_dist"] |= {"bag": min(bag, both), "id": max(both - bag, 0.0)}
    return times, many["output_dist"] - least["output_dist"]


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Of a batch of one rank."""

    bags: int  # of a feature
    features: int = 1
    length: int = 1  # of a bag

    @property
    def names(self) -> list[str]:
        return [f"f{number}" for number in range(self.features)]

    def batch(self, device: torch.device) -> KeyedJaggedTensor:
        bags = self.bags * self.features
        ids = torch.arange(bags * self.length, device=device) % _ROWS
        lengths = torch.full((bags,), self.length, device=device)
        return KeyedJaggedTensor(self.names, ids, lengths=lengths)


def _measured(
    device: torch.device, shapes: dict[str, _Shape], backend: str | None
) -> dict[str, dict[str, float]]:
    """Milliseconds of each part, by shape.

    The shapes take turns: an exchange of ids waits for the host, which is faster at some times than
    at others, and what is wanted are differences between shapes.
    """
    modules = {name: _sharded(device, shape, backend) for name, shape in shapes.items()}
    turns: dict[str, list[list[float]]] = {name: [] for name in shapes}
    for _ in range(_WARM + _STEPS):
        for name, shape in shapes.items():
            # A batch of its own for each step: one that was exchanged knows its counts and offsets.
            turns[name].append(_step(modules[name], shape.batch(device), device))
    typical = statistics.median if device.type == "cuda" else min
    return {
        name: {
            stage: typical(parts)
            for stage, parts in zip(STAGES, zip(*steps[_WARM:], strict=True), strict=True)
        }
        for name, steps in turns.items()
    }


def _sharded(device: torch.device, shape: _Shape, backend: str | None) -> Any:
    """A collection of one small table, row-wise."""
    table = EmbeddingBagConfig(
        name="t", feature_names=shape.names, embedding_dim=_DIM, num_embeddings=_ROWS
    )
    model = EmbeddingBagCollection([table], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.0})
    sharder = BackendEmbeddingBagCollectionSharder()
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(
        model,
        {"t": row_wise()},
        sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
    if backend is not None:
        options = registry.get(backend).options_type()
        plan["t"] = BackendParameterSharding.wrap(plan["t"], backend, options)
        plan["t"].compute_kernel = KERNEL
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    ).module


def _step(module: Any, features: KeyedJaggedTensor, device: torch.device) -> list[float]:
    context = module.create_context()
    clock = _Clock(device)
    received = module.input_dist(context, features).wait().wait()
    (first,) = clock.stop()
    clock = _Clock(device)
    rows = module.compute(context, received)
    clock.mark()
    pooled = module.output_dist(context, rows).wait().values()
    clock.mark()
    pooled.backward(torch.ones_like(pooled))
    return [first, *clock.stop()]


class _Clock:
    """Milliseconds between marks. On a GPU the device's: what the host does is hidden."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Processor time does not see a wait for other ranks.
        one = torch.get_num_threads() == 1 and dist.get_world_size() == 1
        self._now = time.process_time if one else time.perf_counter
        self._marks: list[Any] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda._sleep(_HIDING_CYCLES)
        if dist.get_world_size() > 1:
            # All ranks begin together, on a GPU as the device sees it: else the one that is ahead
            # would wait in the exchange, and its time would be said to be the exchange's.
            dist.all_reduce(torch.ones(1, device=device))
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
