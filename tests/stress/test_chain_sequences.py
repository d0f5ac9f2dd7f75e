"""Thousands of sequences of training, writes, kills, damage, loads and merges of chains of deltas.

Hypothesis draws a sequence of operations and a seed; a Python dictionary has the expected
content. Environment variables:

    TORCHREC_HKV_SEQUENCES: number of sequences; if unset, the test is skipped.
    TORCHREC_HKV_SEQUENCES_SEED: seed of Hypothesis; 1 by default.
    TORCHREC_HKV_SEQUENCES_SECONDS: time limit. The test then reports the sequences not run, and
        fails. No limit by default.

A sequence takes some .2 s, mostly for files; ``--basetemp=/dev/shm/sequences`` puts them in RAM.
With pytest's ``-s``, progress is printed.
"""

from __future__ import annotations

import collections
import os
import shutil
import time

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support.chain_sequences import OPERATIONS, Sequence

SEQUENCES = int(os.environ.get("TORCHREC_HKV_SEQUENCES", "0"))


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not SEQUENCES, reason="a long run: TORCHREC_HKV_SEQUENCES says how many")
def test_chain_sequences(tmp_path):
    torch.set_num_threads(1)  # forks
    limit_s = float(os.environ.get("TORCHREC_HKV_SEQUENCES_SECONDS", "inf"))
    begin = reported_at = time.monotonic()
    done, did = 0, collections.Counter()

    @seed(int(os.environ.get("TORCHREC_HKV_SEQUENCES_SEED", "1")))
    @settings(
        max_examples=SEQUENCES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        number=st.integers(0, (1 << 64) - 1),
        names=st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=16),
    )
    def run(number, names):
        nonlocal done, reported_at
        if time.monotonic() - begin > limit_s:
            return
        folder = tmp_path / "sequence"
        folder.mkdir()
        try:
            sequence = Sequence(number, folder)
            for name in names:
                sequence.do(name)
            sequence.check()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        done += 1
        did.update(sequence.did)
        if time.monotonic() - reported_at > 10:
            reported_at = time.monotonic()
            print(f"{done} sequences in {reported_at - begin:.0f} s", flush=True)

    run()
    print(f"{done} sequences in {time.monotonic() - begin:.0f} s: {dict(did)}", flush=True)
    if done < SEQUENCES:
        pytest.fail(f"only {done} of {SEQUENCES} sequences in {limit_s:.0f} s")
