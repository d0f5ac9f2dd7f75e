"""Trains and scores the sequence example, with known histories or in order of time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from click_data import DataError
from click_training import make_dense_optimizer
from saves import Saves, epochs_done
from sequence_data import Events, Histories, Sampler, batches, last_events, without_last
from sequence_model import BOUND, DIM, SequenceModel, sampled_softmax
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    get_default_sharders,
)
from torchrec_hkv.hash_table import Uniform, initial_rows
from torchrec_hkv.metrics import ConsoleLine, TableMetrics, TensorBoard, collect

RUNS = {"stock": "stock, every item known", "hkv": "hkv, items as they come"}
K = 10
ROW_LEARNING_RATE, DROPOUT = 0.1, 0.2
# Number of histories that are scored at a time, on each rank.
CHUNK = 256
# Number of points of a curve.
POINTS = 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of all runs.

    Attributes:
        batch_size: histories per step, over all ranks.
        length: largest number of items of a history.
        epochs: number of passes over known histories.
        candidates: number of sampled candidates per history.
        rows: rows of the hash table per item that ever appears; None for two.
        seed: seed of rows, weights, batches and samples.
        device: device of the model.
        tensorboard: folder of metrics, with a folder per run; None for no metrics.
        save: folder of checkpoints, with a folder per run; None for no checkpoints.
        resume: folder of checkpoints to resume from; None to begin.
    """

    batch_size: int
    length: int
    epochs: int
    candidates: int
    rows: float | None
    seed: int
    device: torch.device
    tensorboard: Path | None = None
    save: Path | None = None
    resume: Path | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """The result of a run.

    Attributes:
        recall: recall@10.
        ndcg: NDCG@10.
        predictions: number of predictions of which these are means.
        items: number of items in the table at the end.
        progress: pairs (step, recall@10 since the last pair).
    """

    recall: float
    ndcg: float
    predictions: int
    items: int
    progress: list[tuple[int, float]]


class Run:
    """A model, and the mapping of items to ids in its table."""

    def __init__(self, events: Events, key: str, settings: Settings) -> None:
        """
        Args:
            events: the events, which determine the items.
            key: key of the run.
            settings: settings of all runs.
        """
        torch.manual_seed(settings.seed)
        self.settings, self.key = settings, key
        self.items = np.unique(events.items)
        stock = key == "stock"
        share = 1.0 if stock else settings.rows or 2.0
        rows = max(round(share * len(self.items)), dist.get_world_size())
        model = SequenceModel(rows, settings.length, DROPOUT, settings.device)
        apply_optimizer_in_backward(
            RowWiseAdagrad, model.items.parameters(), {"lr": ROW_LEARNING_RATE}
        )
        constraint = ParameterConstraints(
            compute_kernels=["fused" if stock else "hkv"],
            sharding_types=["row_wise"],
            options=None if stock else HKVOptions(seed=settings.seed, eviction="lfu"),
        )
        sharders = get_default_sharders()
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=dist.get_world_size(), compute_device=settings.device.type
            ),
            constraints={"item": constraint},
        )
        plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
        self.model = DistributedModelParallel(
            model, plan=plan, sharders=sharders, device=settings.device
        )
        if stock:
            self._set_rows()
        self.optimizer = make_dense_optimizer(self.model)
        # Saved numbers: the step of a pass or the epoch; sums of hits, gains and predictions.
        self.saves = Saves(
            self.model,
            self.optimizer,
            f"{key}_{settings.seed}",
            settings.save,
            settings.resume,
            numbers=4,
        )
        # Sharding draws random numbers, which differ between stock tables and hash tables.
        torch.manual_seed(settings.seed)

    @torch.no_grad()
    def _set_rows(self) -> None:
        """Sets the rows of the stock table to the initial rows of the hash table."""
        rows = initial_rows(
            torch.from_numpy(self.items),
            DIM,
            table="item",
            seed=self.settings.seed,
            initializer=Uniform(-BOUND, BOUND),
        )
        state = self.model.state_dict()
        (key,) = [key for key in state if key.endswith("item.weight")]
        for shard in state[key].local_shards():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(rows[start : start + len(shard.tensor)])

    def ids(self, items: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Returns the items' ids in the table, on its device; row numbers for a stock table."""
        named = np.asarray(items)
        if self.key == "stock":
            named = np.searchsorted(self.items, named)
        return torch.from_numpy(named).to(self.settings.device)

    def step(self, histories: list[np.ndarray], sampler: Sampler, only_last: bool) -> None:
        """Trains on this rank's part of a batch.

        Args:
            histories: histories of at least two items.
            sampler: samples the candidates.
            only_last: whether to predict only the last item, instead of all but the first.
        """
        device = self.settings.device
        candidates = sampler.sample(len(histories) * self.settings.candidates)
        inputs = Histories.of([part[:-1] for part in histories])
        # The rows of targets are looked up together with the candidates.
        targets = [part[-1:] if only_last else part[1:] for part in histories]
        target_items = np.concatenate(targets)
        filled = -len(target_items) % len(histories)  # pads to equal numbers per history
        candidate_items = np.concatenate(
            [candidates, target_items, np.repeat(target_items[-1:], filled)]
        )
        self.model.train()
        vectors, _, rows = self.model(
            self.ids(inputs.items), inputs.lengths.to(device), self.ids(candidate_items)
        )
        position = torch.arange(vectors.shape[1]).unsqueeze(0)
        lengths = inputs.lengths.unsqueeze(1)
        used = (position == lengths - 1) if only_last else (position < lengths)
        count = len(candidates)
        loss = sampled_softmax(
            vectors[used.to(device)],
            torch.from_numpy(target_items).to(device),
            rows[count : count + len(target_items)],
            torch.from_numpy(candidates).to(device),
            rows[:count],
            sampler.log_share(target_items).to(device),
            sampler.log_share(candidates).to(device),
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def ranks(
        self,
        histories: list[np.ndarray],
        seen: list[np.ndarray],
        targets: np.ndarray,
        sampler: Sampler,
    ) -> torch.Tensor:
        """Returns ranks of targets among the known items, from 0; ``len(known)`` for unknown
        targets.

        Args:
            histories: histories of this rank; every rank must have some.
            seen: earlier choices of each user, which are excluded.
            targets: target of each history, int64 ``[n]``.
            sampler: has the known items.
        """
        self.model.eval()
        device, known = self.settings.device, sampler.known
        number = sampler.number(targets)
        # Each history must have the same number of candidates.
        each = -(-len(known) // len(histories))
        candidate_items = np.resize(known, each * len(histories))
        joined = Histories.of(histories)
        vectors, _, rows = self.model(
            self.ids(joined.items), joined.lengths.to(device), self.ids(candidate_items)
        )
        last = vectors[torch.arange(len(histories)), joined.lengths - 1]
        scores = last @ rows[: len(known)].T
        left_out = torch.zeros(scores.shape, dtype=torch.bool)
        chosen = sampler.number(np.concatenate(seen))
        row = np.repeat(np.arange(len(seen)), [len(items) for items in seen])[chosen < len(known)]
        left_out[torch.from_numpy(row), torch.from_numpy(chosen[chosen < len(known)])] = True
        at = torch.from_numpy(np.minimum(number, len(known) - 1))
        left_out[torch.arange(len(at)), at] = False
        scores = scores.masked_fill(left_out.to(device), float("-inf"))
        target_scores = scores.gather(1, at.to(device).unsqueeze(1))
        place = (scores > target_scores).sum(1).cpu()
        return torch.where(torch.from_numpy(number < len(known)), place, len(known))

    def num_items(self) -> int:
        """Returns the number of items in the table."""
        if self.key == "stock":
            return len(self.items)
        return sum(collect(self.model, dist.group.WORLD).values(), TableMetrics()).size


class Progress:
    """Shows the progress of a run on the console and, if requested, in TensorBoard."""

    def __init__(self, run: Run, steps: int) -> None:
        """
        Args:
            run: the run.
            steps: number of steps of the run.
        """
        self._made, self._stack = run, contextlib.ExitStack()
        speaks, settings = dist.get_rank() == 0, run.settings
        line = ConsoleLine(RUNS[run.key], steps, shown=speaks)
        self._line, self._board = self._stack.enter_context(line), None
        if settings.tensorboard and speaks:
            folder = settings.tensorboard / f"{run.key}_{settings.seed}"
            self._board = self._stack.enter_context(TensorBoard(folder))
        self.points: list[tuple[int, float]] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, step: int, samples: int, recall: float) -> None:
        """Shows the progress. All ranks must call it.

        Args:
            step: number of steps since the run began.
            samples: number of trained samples since the run began.
            recall: recall@10 since the last call.
        """
        self.points.append((step, recall))
        metrics = {} if self._made.key == "stock" else collect(self._made.model, dist.group.WORLD)
        self._line(step, metrics)
        self._line.update(step, samples, recall=recall)
        if self._board is not None:
            self._board(step, metrics)
            self._board.scalars(step, recall=recall)


def _summed(places: torch.Tensor, device: torch.device) -> np.ndarray:
    """Sums hits among the first ten, their gains, and the number of predictions over all ranks."""
    hit = places < K
    gain = (hit / torch.log2(places.double() + 2)).sum()
    sums = torch.stack([hit.sum().double(), gain, torch.tensor(float(len(places))).double()])
    sums = sums.to(device)
    dist.all_reduce(sums)
    return sums.cpu().numpy()


def check_epochs(events: Events, length: int, batch_size: int) -> None:
    """Raises DataError if there are too few histories for :func:`train_epochs`."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    pieces, tests = without_last(events, length), last_events(events)
    if len(pieces) < batch_size or len(tests) < processes:
        raise DataError(
            f"There are {len(pieces)} pieces of histories and {len(tests)} users of three choices "
            f"or more, which is less than a batch of {batch_size}: use more rows."
        )


def check_time(events: Events, batch_size: int) -> None:
    """Raises DataError if there are too few choices for :func:`pass_over_time`."""
    again = (events.position[len(events) // 5 + batch_size :] > 0).sum()
    if len(events) < 5 * batch_size or again < batch_size:
        raise DataError(
            f"There are {len(events)} choices, {again} of them of users who chose before, which is "
            f"less than five batches of {batch_size}: use more rows."
        )


def train_epochs(events: Events, key: str, settings: Settings) -> Score:
    """Trains on all histories without their last items, and predicts these items after each epoch.

    Random draws after resuming differ from those of an uninterrupted run.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pieces, tests = without_last(events, settings.length), last_events(events)
    run = Run(events, key, settings)
    sampler = Sampler(settings.seed * world_size + rank)
    sampler.add(np.concatenate(pieces))
    first = epochs_done(run.saves, settings.epochs, settings.resume)
    steps = (settings.epochs - first) * (len(pieces) // settings.batch_size)
    step, sums = 0, np.zeros(3)
    with Progress(run, steps) as progress:
        for epoch in range(first, settings.epochs):
            for batch in batches(len(pieces), settings.batch_size, settings.seed + 1000 * epoch):
                rank_batch = batch[rank::world_size]
                run.step([pieces[one] for one in rank_batch], sampler, only_last=False)
                step += 1
            sums = score_last(run, events, tests, sampler)
            progress(step, step * settings.batch_size, sums[0] / sums[2])
            run.saves.save(epoch + 1, *sums)
    hits, gain, count = sums
    return Score(hits / count, gain / count, int(count), run.num_items(), progress.points)


def score_last(run: Run, events: Events, tests: np.ndarray, sampler: Sampler) -> np.ndarray:
    """Predicts the last item of each user; returns the sums of :func:`_summed`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = np.zeros(3)
    step = CHUNK * world_size
    for begin in range(0, len(tests), step):
        part = tests[begin : begin + step]
        # Every rank must have at least one; those that also belong to another rank don't count.
        rank_part = part[rank::world_size]
        filled = rank_part if len(rank_part) else part[:1]
        histories = [events.last(event, run.settings.length) for event in filled]
        seen = [events.last(event, len(events)) for event in filled]
        places = run.ranks(histories, seen, events.items[filled], sampler)
        total += _summed(places[: len(rank_part)], run.settings.device)
    return total


def pass_over_time(events: Events, key: str, settings: Settings) -> Score:
    """Makes one pass in order of time: predicts each batch of choices, then trains on it.

    The figures exclude the first fifth of the pass.
    """
    rank, world_size, size = dist.get_rank(), dist.get_world_size(), settings.batch_size
    run = Run(events, key, settings)
    sampler = Sampler(settings.seed * world_size + rank)
    steps = -(-len(events) // size)
    first, *numbers = run.saves.resume()
    if first == steps:
        raise DataError(f"--resume is {settings.resume}, which holds the state after the pass.")
    sums, since = np.array(numbers), np.zeros(3)
    if first:
        sampler.add(events.items[: int(first) * size])
    with Progress(run, steps) as progress:
        for step in range(int(first) + 1, steps + 1):
            begin = (step - 1) * size
            batch = np.arange(begin, min(begin + size, len(events)))
            again = batch[events.position[batch] > 0]
            rank_batch = again[rank::world_size]
            histories = [events.last(event, settings.length) for event in rank_batch]
            if len(again) >= world_size and len(sampler.known):
                seen = [events.last(event, len(events)) for event in rank_batch]
                places = run.ranks(histories, seen, events.items[rank_batch], sampler)
                since += _summed(places, settings.device)
            sampler.add(events.items[batch])
            if len(again) >= world_size:
                whole = zip(histories, events.items[rank_batch], strict=True)
                run.step([np.append(*pair) for pair in whole], sampler, only_last=True)
            if step * POINTS // steps > (step - 1) * POINTS // steps and since[2]:
                progress(step, begin + len(batch) - int(first) * size, since[0] / since[2])
                sums += since if begin >= len(events) // 5 else 0.0
                since[:] = 0
                run.saves.save(step, *sums)
    hits, gain, count = sums
    return Score(hits / count, gain / count, int(count), run.num_items(), progress.points)
