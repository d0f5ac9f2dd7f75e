"""Trains two towers for retrieval and measures recall@k.

    torchrun --nproc_per_node 2 examples/train_two_tower.py

Users and items are in hash tables, so their ids need not be known in advance. The model is trained
on all likes except the last fifth of each user's likes in time. Then it ranks items for each user,
without items that the user liked before. recall@k is the share of the last fifth that is among the
first k items. The recall of the most liked items is printed for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys

import numpy as np
import torch
import torch.distributed as dist
from click_data import ClickLog, DataError
from click_training import TRAIN_SHARE, gather, make_dense_optimizer
from launch import MOVIELENS, load, make_parser, positive, processes, run
from plot import Bars, Curves, add_plot, check_plot, write_panels
from saves import Saves, add_saves, check_saves, epochs_done
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from two_tower import TwoTower

from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    get_default_sharders,
)
from torchrec_hkv.metrics import ConsoleLine, TableMetrics, TensorBoard, Watch, collect

# Number of ids per forward of a tower in the evaluation, on each rank.
CHUNK = 4096
ROW_LEARNING_RATE = 0.02


@dataclasses.dataclass(frozen=True)
class Likes:
    """Users and the items they liked, in order of time: int64 ``[n]`` each."""

    users: np.ndarray
    items: np.ndarray


def likes_of(log: ClickLog) -> tuple[Likes, Likes]:
    """Returns the likes for training, and the last fifth of each user's likes.

    Raises:
        DataError: the log has no users and movies, or no later likes to recall.
    """
    columns = {column.name: column for column in log.columns}
    if not {"user", "movie"} <= set(columns):
        raise DataError(f"{log.name} has no users and movies: name a file of ratings.")
    liked = log.labels > 0
    users, items = columns["user"].ids[liked], columns["movie"].ids[liked]
    _, user, counts = np.unique(users, return_inverse=True, return_counts=True)
    order = np.argsort(user, kind="stable")  # by user, then in time
    position = np.empty(len(users), dtype=np.int64)
    position[order] = np.arange(len(users)) - np.repeat(counts.cumsum() - counts, counts)
    later = position >= np.ceil(TRAIN_SHARE * counts[user])
    train, test = Likes(users[~later], items[~later]), Likes(users[later], items[later])
    known = np.isin(test.users, train.users) & np.isin(test.items, train.items)
    seen = set(zip(train.users.tolist(), train.items.tolist(), strict=True))
    if not set(zip(test.users[known].tolist(), test.items[known].tolist(), strict=True)) - seen:
        raise DataError(
            f"{log.name} has no later likes of known users and movies to recall: use more rows."
        )
    return train, test


def build(
    train: Likes, device: torch.device, arguments: argparse.Namespace
) -> DistributedModelParallel:
    """Plans and shards the model."""
    torch.manual_seed(arguments.seed)
    rows = {"user": 2 * len(np.unique(train.users)), "item": 2 * len(np.unique(train.items))}
    model = TwoTower(rows["user"], rows["item"], device)
    for tower in (model.user, model.item):
        apply_optimizer_in_backward(
            RowWiseAdagrad, tower.rows.parameters(), {"lr": ROW_LEARNING_RATE}
        )
    constraints = {
        name: ParameterConstraints(
            compute_kernels=["hkv"],
            sharding_types=["row_wise"],
            options=HKVOptions(seed=arguments.seed),
        )
        for name in rows
    }
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints=constraints,
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    if dist.get_rank() == 0:
        print(plan)
    return DistributedModelParallel(model, plan=plan, sharders=sharders, device=device)


def train(
    model: DistributedModelParallel,
    likes: Likes,
    device: torch.device,
    arguments: argparse.Namespace,
) -> list[tuple[int, float]]:
    """Trains on the likes in random order.

    Returns:
        Steps and losses.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    columns = [torch.from_numpy(column) for column in (likes.users, likes.items)]
    optimizer = make_dense_optimizer(model)
    saves = Saves(model, optimizer, "two_tower", arguments.save, arguments.resume)
    done = epochs_done(saves, arguments.epochs, arguments.resume)
    steps = (arguments.epochs - done) * (len(likes.users) // arguments.batch_size)
    losses: list[tuple[int, float]] = []
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(ConsoleLine("two towers", steps, shown=rank == 0))
        sinks = [line]
        if arguments.tensorboard and rank == 0:
            sinks.append(stack.enter_context(TensorBoard(arguments.tensorboard)))
        watch = stack.enter_context(Watch(model, 50, sinks, dist.group.WORLD))
        step = 0
        for epoch in range(done, arguments.epochs):
            generator = torch.Generator().manual_seed(arguments.seed + 1000 * epoch)
            order = torch.randperm(len(likes.users), generator=generator)
            for batch in order.split(arguments.batch_size):
                if len(batch) < arguments.batch_size:
                    continue
                rank_batch = batch[rank::world_size]
                loss = model(*(column[rank_batch].to(device) for column in columns))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                watch.step()
                if step % 50 == 0 or step == steps:
                    losses.append((step, loss.item()))
                    line.update(step, step * arguments.batch_size, loss=losses[-1][1])
            saves.save(epoch + 1)
    return losses


@torch.no_grad()
def vectors(tower: torch.nn.Module, ids: np.ndarray, device: torch.device) -> torch.Tensor:
    """Computes the vectors of ids, ``[n, dim]``, on all ranks together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = -(-len(ids) // world_size)
    padded = torch.from_numpy(np.resize(ids, share * world_size))
    rank_ids = padded[rank * share : (rank + 1) * share].to(device)
    parts = [tower(part) for part in rank_ids.split(CHUNK)]
    return gather(torch.cat(parts))[: len(ids)]


def recalls(
    model: torch.nn.Module, train: Likes, later: Likes, k: int, device: torch.device
) -> dict[str, float]:
    """Returns recall@k of the model and of the most liked items, over known users."""
    model.eval()
    module = model.module
    items, counts = np.unique(train.items, return_counts=True)
    known = np.isin(later.users, train.users) & np.isin(later.items, items)
    users = np.unique(later.users[known])
    scores = vectors(module.user, users, device) @ vectors(module.item, items, device).T
    popularity = torch.from_numpy(np.log(counts / counts.sum())).to(device).float()
    scores += popularity
    popularity = popularity.expand_as(scores)
    seen = torch.zeros(scores.shape, dtype=torch.bool, device=device)
    liked = torch.zeros_like(seen)
    for mask, likes in ((seen, train), (liked, later)):
        is_known = np.isin(likes.users, users) & np.isin(likes.items, items)
        row = torch.from_numpy(np.searchsorted(users, likes.users[is_known])).to(device)
        column = torch.from_numpy(np.searchsorted(items, likes.items[is_known])).to(device)
        mask[row, column] = True
    liked &= ~seen
    result = {}
    for name, ranking in (("recall", scores), ("popular", popularity)):
        best = ranking.masked_fill(seen, float("-inf")).topk(min(k, len(items)), dim=1).indices
        found = liked.gather(1, best).sum(1)
        per_user = found / liked.sum(1).clamp(max=k)
        result[name] = per_user[liked.any(1)].mean().item()
    return {**result, "users": int(liked.any(1).sum()), "items": len(items)}


def main() -> None:
    """Parses arguments, trains, measures.

    Raises:
        DataError: the input is invalid.
    """
    parser = make_parser(__doc__, MOVIELENS)
    parser.add_argument("--epochs", type=positive, default=5, help="(default: %(default)s)")
    parser.add_argument("-k", type=positive, default=50, help="(default: %(default)s)")
    add_plot(parser, "the loss, and recall@k beside that of the most liked items")
    add_saves(parser)
    arguments = parser.parse_args()
    check_plot(arguments.plot)
    check_saves(arguments)
    log = load(arguments, TRAIN_SHARE)
    likes, later = likes_of(log)
    if len(likes.users) < arguments.batch_size:
        raise DataError(f"A batch of {arguments.batch_size} is more than the likes to train on.")
    with processes(arguments.device) as device:
        model = build(likes, device, arguments)
        losses = train(model, likes, device, arguments)
        result = recalls(model, likes, later, arguments.k, device)
        total = sum(collect(model, dist.group.WORLD).values(), TableMetrics())
        if dist.get_rank() == 0:
            k = arguments.k
            print(
                f"recall@{k} {result['recall']:.4f} (most liked items: {result['popular']:.4f}), "
                f"{result['users']:,} users, {result['items']:,} items, {total.size:,} rows"
            )
            if arguments.json:
                content = {"data": log.name, "k": k, **result}
                arguments.json.write_text(json.dumps(content, indent=2) + "\n")
            if arguments.plot:
                bars = {"two towers": result["recall"], "most liked": result["popular"]}
                panels = [Curves("steps", "loss", {"loss": losses}), Bars(f"recall@{k}", bars)]
                write_panels(arguments.plot, log.name, panels)


if __name__ == "__main__":
    sys.exit(run(main))
