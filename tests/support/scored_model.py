"""Tables of all policies in one collection, and a dictionary model of each shard.

Each shard has at most two buckets, so that an id may take every slot, and the dictionary knows
which ids leave. Rows start from a constant and change by binary fractions, so that sums are exact.
"""

from __future__ import annotations

import dataclasses
import struct

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.geometry import geometry
from torchrec_hkv import HKVOptions, ParameterConstraints
from torchrec_hkv.hash_table import Constant
from torchrec_hkv.hash_table.routing import owner_rank

DIM, BATCH, RATE, START = 8, 6, 0.125, 0.5

#: Feature, options and number of ids by table; ``s`` is a stock table.
FEATURES = {
    "c": ["f", "f2"],
    "w": ["g"],
    "el": ["h"],
    "ef": ["k"],
    "lru": ["m"],
    "lf": ["n"],
    "s": ["s"],
}
OPTIONS = {
    "c": {"eviction": "customized", "score_feature": ("f_score", "f2_score")},
    "w": {"eviction": "customized", "score_from": "weights"},
    "el": {"eviction": "epoch_lru"},
    "ef": {"eviction": "epoch_lfu"},
    "lru": {"eviction": "lru"},
    "lf": {"eviction": "lfu", "remember_evicted": 1 << 22, "restore_counts": True},
}
SCORES = {"f": "f_score", "f2": "f2_score"}
NUM_IDS = 500


@dataclasses.dataclass(frozen=True)
class ScoredCase:
    """A test case.

    Attributes:
        tables: names of the tables.
        kind: ``"bags"``, ``"weighted"``, ``"sequences"`` or ``"distinct"`` (sequences, each id
            sent once).
        sharding_type: sharding type of all tables.
        rows: rows of each table, over all ranks.
    """

    tables: tuple[str, ...]
    kind: str
    sharding_type: str
    rows: int

    @property
    def are_bags(self) -> bool:
        """Returns whether rows are pooled."""
        return self.kind in ("bags", "weighted")


@torch.fx.wrap
def rows_of(out) -> dict[str, torch.Tensor]:
    """Returns a collection's output by feature. Train pipelines trace its callers."""
    rows = {key: out[key] for key in out.keys()}  # noqa: SIM118
    return {k: v.values() if isinstance(v, JaggedTensor) else v for k, v in rows.items()}


@torch.fx.wrap
def total(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sums all looked-up rows."""
    return sum(part.sum() for part in rows.values())


class ScoredModel(nn.Module):
    """A collection under the name ``over``."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.over = collection

    def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Returns pooled rows or rows, by feature."""
        return rows_of(self.over(features))


class WithLoss(nn.Module):
    """The model with a loss, for pipelines."""

    def __init__(self, model: ScoredModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of all rows, twice."""
        loss = total(self.model(features))
        return loss, loss


def unsharded(case: ScoredCase) -> ScoredModel:
    """Creates the model on the meta device."""
    config = EmbeddingBagConfig if case.are_bags else EmbeddingConfig
    tables = [
        config(
            name=name,
            num_embeddings=NUM_IDS if name == "s" else case.rows,
            embedding_dim=DIM,
            feature_names=FEATURES[name],
        )
        for name in case.tables
    ]
    meta = torch.device("meta")
    collection = (
        EmbeddingBagCollection(tables=tables, device=meta, is_weighted=case.kind == "weighted")
        if case.are_bags
        else EmbeddingCollection(tables=tables, device=meta)
    )
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": RATE})
    return ScoredModel(collection)


def constraints(case: ScoredCase) -> dict[str, ParameterConstraints]:
    """Returns the constraints of each table."""
    return {
        name: ParameterConstraints(
            compute_kernels=["fused" if name == "s" else "hkv"],
            sharding_types=[case.sharding_type],
            min_partition=DIM // 2,
            options=None
            if name == "s"
            else HKVOptions(initializer=Constant(START), deterministic=True, **OPTIONS[name]),
        )
        for name in case.tables
    }


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a batch: bags of ids, each with a weight and a score."""

    bags: list[list[tuple[int, float, int]]]


def draw(case: ScoredCase, rank: int, step: int) -> dict[str, Feature]:
    """Draws the batch of a rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    narrow = case.kind == "weighted"
    found = {}
    for name in case.tables:
        for feature in FEATURES[name]:
            bags = []
            for length in torch.randint(0, 7, (BATCH,), generator=generator).tolist():
                ids = torch.randint(0, NUM_IDS, (length,), generator=generator)
                ids = ids if name == "s" else ids * 2**40 - 3
                weights = torch.randint(-8, 9, (length,), generator=generator) / 4
                bits = 31 if narrow else 63
                scores = torch.randint(-(2**bits), 2**bits - 1, (length,), generator=generator)
                bags.append(list(zip(ids.tolist(), weights.tolist(), scores.tolist(), strict=True)))
            found[feature] = Feature(bags)
    return found


def to_kjt(
    case: ScoredCase, features: dict[str, Feature], device: torch.device
) -> KeyedJaggedTensor:
    """Converts a batch; features of scores are between other features."""
    keys, values, lengths, weights = [], [], [], []
    for key, feature in features.items():
        flat = [entry for bag in feature.bags for entry in bag]
        columns = [(key, 0)] + ([(SCORES[key], 2)] if key in SCORES else [])
        for column, index in columns[::-1]:  # scores before their ids
            keys.append(column)
            values += [entry[index] for entry in flat]
            weights += [entry[1] for entry in flat]
            lengths += [len(bag) for bag in feature.bags]
    has_weights = case.kind == "weighted" or "w" in case.tables
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(values, dtype=torch.int64, device=device),
        lengths=torch.tensor(lengths, device=device),
        weights=torch.tensor(weights, device=device) if has_weights else None,
    )


def score_of_weight(weight: float) -> int:
    """A separate implementation of ``scores_of_weights``."""
    (bits,) = struct.unpack("<i", struct.pack("<f", weight))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF) - 1


class ModelShard:
    """One rank's part of a table.

    Attributes:
        entries: ``[row value, score, step of the last lookup]`` by id.
    """

    def __init__(self, name: str, rows: int) -> None:
        self.name = name
        _, buckets, bucket_slots = geometry(rows, rows)
        assert buckets <= 2
        self.slots = buckets * bucket_slots
        self.entries: dict[int, list] = {}
        self.evicted = 0
        self.halves: dict[int, int] = {}  # halved counts of ids that have left

    def _scored(self, old: int | None, given: int, step: int, epoch: int) -> int:
        if self.name in ("c", "w"):
            return given
        if self.name == "el":
            return epoch << 32 | step
        if self.name == "ef":
            return epoch << 32 | ((0 if old is None else old & 0xFFFFFFFF) + 1)
        if self.name == "lf":
            return (old or 0) + 1
        return step

    def look_up(self, ids: list[tuple[int, int]], step: int, epoch: int, kept: set[int]) -> None:
        """Finds or inserts ids, each with its score.

        Among ids that may equally leave, ids that are not in ``kept`` leave.
        """
        missing, evicted = [], {}
        for id_, given in ids:
            if id_ in self.entries:
                entry = self.entries[id_]
                entry[1:] = [self._scored(entry[1], given, step, epoch), step]
            else:
                missing.append((id_, given))
        for id_, given in missing:
            if id_ in self.entries:
                entry = self.entries[id_]
                entry[1:] = [self._scored(entry[1], given, step, epoch), step]
                continue
            if len(self.entries) == self.slots:
                old = [i for i, entry in self.entries.items() if entry[2] < step]
                lowest = min(old, key=lambda i: (*self.entries[i][1:], i in kept))
                evicted[lowest] = self.entries.pop(lowest)[1] // 2
                self.evicted += 1
            self.entries[id_] = [START, self._scored(None, given, step, epoch), step]
            if self.name == "lf":
                self.entries[id_][1] += self.halves.get(id_, 0)
        self.halves |= evicted
        for id_, given in ids if self.name in ("c", "w") else ():
            self.entries[id_][1] = given  # the last score counts


class Dictionary:
    """All shards of all backend tables."""

    def __init__(self, case: ScoredCase, world_size: int) -> None:
        self.case, self.world_size = case, world_size
        self.by_rows = case.sharding_type in ("row_wise", "table_row_wise", "grid_shard")
        names = [name for name in case.tables if name != "s"]
        parts = world_size if case.sharding_type == "row_wise" else 1
        self.parts = parts
        self.shards = {
            name: [ModelShard(name, case.rows // parts) for _ in range(parts)] for name in names
        }
        self.step = 0

    def _owner(self, id_: int) -> int:
        return int(owner_rank(torch.tensor([id_]), self.parts)) if self.parts > 1 else 0

    def _sent(self, name: str, feature: str, batch: dict[str, Feature]) -> list[tuple[int, int]]:
        """Returns the ids of a feature that one rank sends, with scores."""
        flat = [entry for bag in batch[feature].bags for entry in bag]
        if name == "w":
            return [(id_, score_of_weight(weight)) for id_, weight, _ in flat]
        return [(id_, score) for id_, _, score in flat]

    def train(
        self,
        batches: list[dict[str, Feature]],
        epoch: int,
        kept: dict[tuple[str, int], set[int]],
    ) -> list[dict[str, torch.Tensor]]:
        """Trains a step of all ranks whose loss is the sum of all outputs; returns outputs by rank.

        Args:
            batches: batches by rank.
            epoch: epoch of the step.
            kept: ids in the real table after the lookup, by table and shard.
        """
        self.step += 1
        weighted = self.case.kind == "weighted"
        for name, shards in self.shards.items():
            sent = self._arrived(name, batches)
            for part, shard in enumerate(shards):
                owned = [entry for entry in sent if self._owner(entry[0]) == part]
                shard.look_up(owned, self.step, epoch, kept[name, part])
        outputs = [{} for _ in batches]
        gradients: dict[tuple[str, int], float] = {}
        for rank, batch in enumerate(batches):
            for name in self.case.tables:
                for feature in FEATURES[name]:
                    bags = []
                    for bag in batch[feature].bags:
                        values = []
                        for id_, weight, _ in bag:
                            factor = weight if weighted else 1.0
                            values.append(factor * self._row(name, id_))
                            key = (name, id_)
                            gradients[key] = gradients.get(key, 0.0) + factor / self.world_size
                        bags.append([sum(values)] if self.case.are_bags else values)
                    flat = [value for bag in bags for value in bag]
                    outputs[rank][feature] = torch.tensor(flat)
        for (name, id_), gradient in gradients.items():
            if name != "s":
                self.shards[name][self._owner(id_)].entries[id_][0] -= RATE * gradient
        return outputs

    def _row(self, name: str, id_: int) -> float:
        return 1.0 if name == "s" else self.shards[name][self._owner(id_)].entries[id_][0]

    def _arrived(self, name: str, batches: list[dict[str, Feature]]) -> list[tuple[int, int]]:
        """Returns the ids that arrive, by feature, then by rank."""
        if self.case.kind != "distinct":
            return [
                entry
                for feature in FEATURES[name]
                for batch in batches
                for entry in self._sent(name, feature, batch)
            ]
        arrived = []
        for batch in batches:  # each id once, in order, with the last of its scores
            sent = [e for feature in FEATURES[name] for e in self._sent(name, feature, batch)]
            arrived += sorted(dict(sent).items())
        return arrived
