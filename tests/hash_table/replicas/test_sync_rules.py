"""Syncs of tables that train, lose ids and grow at random follow the rules on every replica."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replica_model import Replica, ReplicaEntry, ReplicaModel
from tests.support.thread_wire import ThreadWire, in_threads
from torchrec_hkv.hash_table import (
    SGD,
    Adam,
    AgedLFU,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    initial_rows,
)
from torchrec_hkv.hash_table.replicas import GroupSync, id_sync_bytes
from torchrec_hkv.hash_table.stored_rows import numbers_of

POLICIES = ("lru", "lfu", AgedLFU(0.7), "epoch_lru", "epoch_lfu", "customized")
#: By name: optimizer, and which state counts a row's updates.
OPTIMIZERS = {
    "sgd": (SGD(), None),
    "rowwise_adagrad": (RowWiseAdagrad(), None),
    "adam": (Adam(), None),
    "adam_by_row": (Adam(step_mode="row"), 2 * 3),
}
DIM = 3


@dataclasses.dataclass
class _Case:
    replicas: int
    policy: object
    optimizer: str
    capacity: int
    initial: int | None
    expire_after: int | None
    dtype: torch.dtype = torch.float32
    swaps: bool = False  # whether two replicas on a CPU exchange messages directly


CASES = st.builds(
    _Case,
    st.sampled_from((2, 3)),
    st.sampled_from(POLICIES),
    st.sampled_from(tuple(OPTIMIZERS)),
    st.sampled_from((40, 150, 600)),
    st.sampled_from((None, 20)),
    st.sampled_from((None, None, 2)),
    st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.int8)),
    st.booleans(),
)


class _Replicas:
    """Replicas of two tables, beside a model of both tables."""

    def __init__(self, case: _Case, pool: list[int], device: str) -> None:
        self.case, self.device = case, device
        optimizer, own_step = OPTIMIZERS[case.optimizer]
        self.specs = [
            TableSpec(
                name,
                case.capacity,
                DIM,
                case.policy,
                initializer=Uniform(-1, 1),
                initial_capacity=case.initial,
                expire_after=case.expire_after,
                dtype=case.dtype,
            )
            for name in ("a", "b")
        ]
        self.groups = [
            TableGroup(self.specs, [0, 1], optimizer, device) for _ in range(case.replicas)
        ]
        wires = ThreadWire.make(case.replicas, case.swaps)
        self.syncs = [
            GroupSync(group, [0, 1], wire, batch_bytes=8192)
            for group, wire in zip(self.groups, wires, strict=True)
        ]
        policy = "aged_lfu" if isinstance(case.policy, AgedLFU) else case.policy
        width = self.groups[0].export_table(0).states.shape[1]
        self.models = [
            ReplicaModel(
                case.replicas,
                policy,
                dict(zip(pool, _initial(pool, spec), strict=True)).__getitem__,
                width,
                own_step,
            )
            for spec in self.specs
        ]

    def held(self, table: int) -> list[Replica]:
        return [_held(group, table) for group in self.groups]

    def train(self, generator: random.Random, pool: list[int]) -> None:
        replica = generator.randrange(self.case.replicas)
        group = self.groups[replica]
        parts = [
            [generator.choice(pool) for _ in range(generator.choice((0, 5, 30)))] for _ in "ab"
        ]
        ids = torch.tensor(parts[0] + parts[1], dtype=torch.int64, device=self.device)
        offsets = torch.tensor([0, len(parts[0]), len(ids)], device=self.device)
        scores = None
        if self.case.policy == "customized":
            values = [generator.randrange(-50, 50) for _ in range(len(ids))]
            scores = torch.tensor(values, dtype=torch.int64, device=self.device)
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        rate = torch.full((), 0.1, device=self.device)
        out = group.train_lookup(anchor, ids, offsets, None, 1, False, rate, scores=scores)
        out.backward(torch.full_like(out, generator.uniform(-1, 1)))
        for table, own in enumerate(parts):
            there = set(_held(group, table))
            self.models[table].touched[replica] |= set(own) & there

    def erase(self, generator: random.Random) -> None:
        replica = generator.randrange(self.case.replicas)
        group, table = self.groups[replica], generator.randrange(2)
        held = sorted(_held(group, table))
        removed = generator.sample(held, len(held) // 5)
        ids = torch.tensor(removed, dtype=torch.int64, device=self.device)
        ends = [0, len(removed), len(removed)] if table == 0 else [0, 0, len(removed)]
        group.erase(ids, torch.tensor(ends, device=self.device), 1)

    def set_epoch(self, epoch: int) -> None:
        for group in self.groups:
            group.set_epoch(epoch)

    def sync(self) -> None:
        now = [self.held(table) for table in range(2)]
        agreed = [model.merged(own) for model, own in zip(self.models, now, strict=True)]
        done = in_threads([sync.sync for sync in self.syncs])
        lost = [0] * self.case.replicas
        for table, model in enumerate(self.models):
            touched = model.anywhere(now[table])
            after = self.held(table)
            for r, own in enumerate(after):
                wanted = {
                    id_: kept
                    for id_, kept in agreed[table].items()
                    if id_ in touched or id_ in now[table][r]
                }
                assert set(own) <= set(wanted)
                lost[r] += len(set(wanted) - set(own))
                for id_, kept in own.items():
                    _check_equal(kept, wanted[id_], self.case.dtype)
            for id_ in set().union(*after):  # bit for bit
                assert len({own[id_] for own in after if id_ in own}) == 1
            model.synced(now[table], after, agreed[table])
        assert [one.lost for one in done] == lost
        clocks = {group.clock for group in self.groups}
        assert len(clocks) == 1


def _check_equal(kept: ReplicaEntry, wanted: ReplicaEntry, dtype: torch.dtype) -> None:
    assert kept.step == wanted.step
    assert kept.score == wanted.score
    rounding, minimum = 2**-8 if dtype == torch.bfloat16 else 1e-5, 1e-6
    if dtype == torch.int8:  # each replica's row and the merged one, to half of its scale
        minimum = 4 * max(1.0, *map(abs, wanted.row)) / 254
    assert kept.row == pytest.approx(wanted.row, rel=rounding, abs=minimum)
    assert kept.state == pytest.approx(wanted.state, rel=1e-5, abs=1e-6)


def _held(group: TableGroup, table: int) -> Replica:
    state = group.export_table(table)
    slots = state.occupied.nonzero().flatten()
    scores = state.scores[slots].tolist() if state.scores.numel() else [0] * len(slots)
    states = state.states[slots].tolist() if state.states.numel() else [[]] * len(slots)
    return {
        id_: ReplicaEntry(tuple(row), tuple(own), step, score)
        for id_, row, own, step, score in zip(
            state.ids[slots].tolist(),
            numbers_of(state.rows[slots], DIM).tolist(),
            states,
            state.last_steps[slots].tolist(),
            scores,
            strict=True,
        )
    }


def _initial(ids: list[int], spec: TableSpec) -> list[tuple[float, ...]]:
    rows = initial_rows(
        torch.tensor(ids), DIM, table=spec.name, seed=spec.seed, initializer=spec.initializer
    )
    return [tuple(row) for row in rows.tolist()]


def _run(case: _Case, seed: int, device: str) -> None:
    generator = random.Random(seed)
    pool = [generator.randrange(-(2**63), 2**63) for _ in range(generator.choice((30, 200, 700)))]
    pool[:3] = [-1, -(2**63), 0]
    replicas = _Replicas(case, pool, device)
    for epoch in range(5):
        for _ in range(generator.choice((0, 1, 6, 12))):
            if generator.random() < 0.1:
                replicas.erase(generator)
            else:
                replicas.train(generator, pool)
        replicas.sync()
        if generator.random() < 0.5:
            replicas.set_epoch(epoch + 1)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=CASES, seed=st.integers(0, 2**32))
def test_the_rules(case, seed):
    _run(case, seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_the_rules_on_a_gpu(seed):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    pick = random.Random(seed).choice
    case = _Case(
        pick((2, 3)),
        pick(POLICIES),
        pick(tuple(OPTIMIZERS)),
        pick((40, 150, 600)),
        pick((None, 20)),
        pick((None, 2)),
        pick((torch.float32, torch.bfloat16, torch.int8)),
    )
    _run(case, seed, "cuda")


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("lru", RowWiseAdagrad()), ("lfu", SGD()), ("epoch_lru", Adam(step_mode="row"))],
)
def test_bytes_are_as_planned(policy, optimizer, swaps):
    wires = ThreadWire.make(2, swaps)
    groups = [TableGroup([TableSpec("a", 5000, 16, policy)], [0], optimizer, "cpu") for _ in wires]
    syncs = [GroupSync(group, [0], wire) for group, wire in zip(groups, wires, strict=True)]
    for first, group in enumerate(groups):
        ids = torch.arange(1000) + 500 * first
        anchor = torch.empty(0, requires_grad=True)
        offsets = torch.tensor([0, 1000])
        group.train_lookup(anchor, ids, offsets, None, 1, False, torch.tensor(0.1)).sum().backward()
    for done in in_threads([sync.sync for sync in syncs]):
        width = groups[0].export_table(0).states.shape[1]
        own_steps = isinstance(optimizer, Adam)
        planned = id_sync_bytes(1000, 1500, 16, width, policy, 2, own_steps=own_steps, swaps=swaps)
        assert done.touched == 1500
        shared = 8 * (1 + 1 + 3)  # numbers of updates, the clock, and three numbers of ids
        assert done.sent_bytes == planned + shared
