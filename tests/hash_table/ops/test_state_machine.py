"""Hypothesis compares a table with the model under all operations and policies, at tiny
capacities."""

import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.batches import INT64_MAX, INT64_MIN
from tests.support.checked_table import CheckedTable
from tests.support.table_model import POLICIES, TAKES_SCORES
from tests.support.table_observation import Row
from torchrec_hkv.hash_table import (
    Admission,
    Constant,
    EvictionPolicy,
    MinFrequency,
    Probability,
    Uniform,
)

EXTREMES = [INT64_MIN, INT64_MIN + 1, -2, -1, 0, 1, 2**31, 2**32, INT64_MAX - 1, INT64_MAX]
single_ids = st.one_of(
    st.integers(-4, 40), st.sampled_from(EXTREMES), st.integers(INT64_MIN, INT64_MAX)
)
given_scores = {
    "customized": st.one_of(
        st.integers(0, 8),
        st.sampled_from([2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63)]),
        st.integers(-(2**63), 2**63 - 1),
    ),
    "lfu": st.one_of(
        st.integers(0, 3), st.integers(0, 3), st.sampled_from([2**32, 2**62, 2**63 - 1])
    ),
    "epoch_lfu": st.one_of(
        st.integers(0, 3), st.integers(0, 3), st.sampled_from([2**31, 2**32 - 1, 2**32, 2**63 - 1])
    ),
}
ages = st.one_of(st.none(), st.none(), st.integers(1, 12), st.just(70))
halvings = st.one_of(st.none(), st.integers(1, 9))
admissions = st.one_of(
    st.none(),
    st.none(),
    st.builds(
        MinFrequency,
        st.integers(2, 4),
        entries=st.sampled_from([1, 8, 20, 1000]),
        halve_every=halvings,
    ),
    st.builds(
        MinFrequency,
        st.sampled_from([2, 3, 300]),
        sketch_bytes=st.sampled_from([16, 100, 4096]),
        halve_every=halvings,
    ),
    st.builds(Probability, st.sampled_from([0.01, 0.5, 1.0])),
)


@st.composite
def id_batches(draw: st.DrawFn, capacity: int) -> list[int]:
    """A few ids, a run of ids that may overfill the table, or both; with repetitions."""
    ids = draw(st.lists(single_ids, max_size=12))
    if draw(st.booleans()):
        start = draw(st.integers(-4, 2 * capacity))
        stride = draw(st.sampled_from([1, 1, 1, 3, 2**20, 2**40]))
        length = draw(st.integers(0, capacity + 8))
        ids = ids + [start + stride * at for at in range(length)]
    if ids and draw(st.booleans()):
        ids = ids + ids[:: draw(st.integers(1, 5))]
    return ids


class HashTableMachine(RuleBasedStateMachine):
    """Operations on one table and its model."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.rows_made = 0

    @initialize(
        capacity=st.one_of(st.integers(1, 8), st.integers(1, 128), st.integers(129, 512)),
        dim=st.sampled_from([1, 2, 3]),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
        initializer=st.sampled_from([Uniform(-1, 1), Constant(0.25), Constant(0)]),
        admission=admissions,
        expire_after=ages,
        initial=st.one_of(st.none(), st.integers(1, 64), st.integers(1, 300)),
    )
    def make(
        self,
        capacity: int,
        dim: int,
        dtype: torch.dtype,
        initializer: Uniform | Constant,
        admission: Admission | None,
        expire_after: int | None,
        initial: int | None,
    ) -> None:
        self.capacity, self.dim = capacity, dim
        self.checked = CheckedTable(
            self.policy,
            capacity,
            dim,
            dtype=dtype,
            initializer=initializer,
            admission=admission,
            expire_after=expire_after,
            # The model can't predict what expires in a call that grows the table.
            initial_capacity=(
                None if initial is None or expire_after is not None else min(initial, capacity)
            ),
        )
        # Sums of small whole numbers do not depend on their order.
        self.exact_sums = dtype == torch.float32 and isinstance(initializer, Constant)

    def draw_ids(self, data: st.DataObject) -> list[int]:
        return data.draw(id_batches(self.capacity), label="ids")

    def draw_scores(self, data: st.DataObject, n: int) -> list[int] | None:
        if self.policy not in TAKES_SCORES:
            return None
        if self.policy != "customized" and data.draw(st.booleans(), label="no scores"):
            return None
        few = st.lists(given_scores.get(self.policy, given_scores["lfu"]), min_size=1, max_size=7)
        scores = data.draw(few, label="scores, repeated")
        return [scores[at % len(scores)] for at in range(n)]

    def new_rows(self, n: int) -> list[Row]:
        """Small whole numbers; neighbours differ."""
        self.rows_made += 1
        return [
            tuple(float((7 * self.rows_made + 3 * at + c) % 101 - 50) for c in range(self.dim))
            for at in range(n)
        ]

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        self.checked.find(self.draw_ids(data))

    @rule(data=st.data())
    def find_or_insert(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.checked.find_or_insert(ids, self.draw_scores(data, len(ids)))

    @rule(data=st.data())
    def find_or_insert_slots(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.checked.find_or_insert_slots(ids, self.draw_scores(data, len(ids)))

    @rule(data=st.data())
    def insert_or_assign(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        scores = self.draw_scores(data, len(ids))
        self.checked.insert_or_assign(ids, self.new_rows(len(ids)), scores)

    @rule(data=st.data())
    def insert_and_evict(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        scores = self.draw_scores(data, len(ids))
        self.checked.insert_and_evict(ids, self.new_rows(len(ids)), scores)

    @rule(data=st.data())
    def accum_or_assign(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        if not self.exact_sums:
            ids = list(dict.fromkeys(ids))
        wrong = data.draw(st.sets(st.integers(0, 20)), label="wrong beliefs")
        there = [id_ in self.checked.model.entries for id_ in ids]
        accumulate = [hit != (at in wrong) for at, hit in enumerate(there)]
        scores = self.draw_scores(data, len(ids))
        self.checked.accum_or_assign(ids, self.new_rows(len(ids)), accumulate, scores)

    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.checked.assign(ids, self.new_rows(len(ids)), self.draw_scores(data, len(ids)))

    @rule(data=st.data())
    def assign_rows(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.checked.assign_rows(ids, self.new_rows(len(ids)))

    @rule(data=st.data())
    def assign_scores(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data)
        self.checked.assign_scores(ids, self.draw_scores(data, len(ids)))

    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        self.checked.erase(self.draw_ids(data))

    def draw_conditions(self, data: st.DataObject) -> dict[str, int | None]:
        """Bounds at and next to existing scores, and extreme ones."""
        signed = self.checked.table.eviction == "customized"
        maximum = 2**63 - 1 if signed else 2**64 - 1
        bounds = {0, 1, 2**32, 2**63 - 1, maximum, *([-1, -(2**63)] if signed else [2**63])}
        for entry in self.checked.model.entries.values():
            bounds |= {entry.score, min(entry.score + 1, maximum)}
        bound = st.one_of(st.none(), st.sampled_from(sorted(bounds)))
        ages = st.one_of(st.none(), st.integers(0, 12))
        return {
            "score_below": data.draw(bound, label="score_below"),
            "score_at_least": data.draw(bound, label="score_at_least"),
            "older_than": data.draw(ages, label="older_than"),
        }

    @rule(data=st.data())
    def erase_if(self, data: st.DataObject) -> None:
        self.checked.erase_if(**self.draw_conditions(data))

    @rule(data=st.data(), batch_size=st.sampled_from([1, 2, 7, 64, 1000]))
    def export_if(self, data: st.DataObject, batch_size: int) -> None:
        self.checked.export_if(batch_size, **self.draw_conditions(data))

    @precondition(lambda self: self.checked.model.expire_after is not None)
    @rule()
    def expire(self) -> None:
        self.checked.expire()

    @rule(share=st.floats(0, 1))
    def reserve(self, share: float) -> None:
        self.checked.reserve(int(share * self.checked.table.capacity))

    @rule()
    def clear(self) -> None:
        self.checked.clear()

    @precondition(lambda self: self.policy in ("epoch_lru", "epoch_lfu"))
    @rule(by=st.sampled_from([1, 2, 1000]))
    def next_epoch(self, by: int) -> None:
        self.checked.next_epoch(by)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_follows_the_model(policy):
    run_state_machine_as_test(
        lambda: HashTableMachine(policy),
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    "TORCHREC_HKV_EXAMPLES" not in os.environ,
    reason="a long run: TORCHREC_HKV_EXAMPLES says how many examples a policy",
)
@pytest.mark.parametrize("policy", POLICIES)
def test_follows_the_model_at_length(policy):
    examples = int(os.environ["TORCHREC_HKV_EXAMPLES"])
    run_state_machine_as_test(
        lambda: HashTableMachine(policy),
        settings=settings(max_examples=examples, stateful_step_count=60, deadline=None),
    )
