"""Random sequences of training, writes, kills, damage, loads and merges agree with a Python
dictionary."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.chain_sequences import OPERATIONS, Sequence

operations = st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=14)


# tests/stress/test_chain_sequences.py runs thousands of sequences.
@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 32), names=operations)
# Several files of a shard are copied at once, and rows change without a lookup.
@example(seed=3, names=["train"] * 6 + ["write_behind"])
@example(seed=0, names=["train", "train", "write", "assign", "write"])
def test_sequences(tmp_path_factory, seed, names):
    sequence = Sequence(seed, tmp_path_factory.mktemp("sequence"))
    for name in names:
        sequence.do(name)
    sequence.check()
