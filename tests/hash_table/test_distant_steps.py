"""Steps far apart: on a CPU, tables that count lookups store steps relative to a window."""

import pytest
import torch

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.tables import make
from torchrec_hkv.hash_table import AgedLFU

POLICIES = ["lru", "lfu", AgedLFU(2.0)]
#: Steps of a window, and steps around its ends.
WINDOW = 2**23
CLOCKS = [
    5,
    WINDOW // 2,
    WINDOW - 2,
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    3 * WINDOW + 7,
    2**31,
    2**32 - 9,
]
COUNTS = [1, 127, 128, 255, 256, 2**40, 2**63 - 1]


def entries_of(table) -> dict[int, tuple[int, int]]:
    """Last step and score by id."""
    state = table._group.export_table(0)
    at = state.occupied.cpu().nonzero().flatten()
    steps = state.last_steps.cpu()[at].long() % 2**32
    scores = state.scores.cpu()[at] if len(state.scores) else steps
    ids = state.ids.cpu()[at].tolist()
    return dict(zip(ids, zip(steps.tolist(), scores.tolist(), strict=True), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_and_counts_stay_exact(device_type, policy):
    table = make(device_type, 640, dim=1, eviction=policy)
    counted = policy != "lru"
    expected: dict[int, tuple[int, int]] = {}
    for round_, clock in enumerate(CLOCKS):
        table._group.set_clock(clock)
        # Some ids are new; some were last looked up one or several rounds ago.
        ids = torch.cat([torch.randperm(40 * round_ + 1)[:25], torch.arange(40) + 40 * round_])
        ids = ids.unique()
        given = torch.tensor(COUNTS)[torch.randint(len(COUNTS), ids.shape)]
        table.find_or_insert(ids.to(device_type), given.to(device_type) if counted else None)
        for id_, more in zip(ids.tolist(), given.tolist(), strict=True):
            before = expected.get(id_, (0, 0))[1]
            score = min(before + more, 2**63 - 1) if counted else clock + 1
            expected[id_] = (clock + 1, score)
        assert entries_of(table) == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [3, 8, 40, 64])
def test_the_lowest_leaves(device_type, policy, capacity):
    table = make(device_type, capacity, dim=1, eviction=policy)
    aged = AgedLFUModel(policy.c) if isinstance(policy, AgedLFU) else None
    entries: dict[int, tuple[int, int]] = {}  # id to last step and score

    def rank(step: int, score: int) -> tuple[int, int]:
        return (score if aged is None else aged.rank(score, step)), step

    id_, lookups, clock = 0, 0, 0
    gaps = torch.tensor([0, 0, 0, 1, 3, WINDOW // 3, WINDOW - 1, WINDOW])
    for gap in gaps[torch.randint(len(gaps), (120,))].tolist():
        clock = min(clock + gap, 2**32 - 200)
        if gap > 0:
            table._group.set_clock(clock)
            if aged is not None:
                aged.seen = None  # steps before a jump of the clock are not measured
        clock += 1
        again = bool(torch.rand(()) < 0.4) and bool(entries)
        id_ += not again
        its = list(entries)[int(torch.randint(len(entries), ()))] if again else id_
        count = int(torch.tensor([1, 2, 100, 127, 300])[torch.randint(5, ())])
        given = None if policy == "lru" else torch.tensor([count], device=device_type)
        table.find_or_insert(torch.tensor([its], device=device_type), given)
        if aged is not None:
            aged.begin_call(clock, lookups, capacity)
        lookups += 1
        score = clock if policy == "lru" else count + (entries[its][1] if again else 0)
        if not again and len(entries) == capacity:
            ranks = {each: rank(*entry) for each, entry in entries.items()}
            lowest = min(ranks, key=ranks.__getitem__)
            if rank(clock, score)[0] < ranks[lowest][0] and policy != "lru":
                continue  # refused
            del entries[lowest]
        entries[its] = (clock, score)
        assert entries_of(table) == entries


@pytest.mark.parametrize("policy", POLICIES)
def test_loaded_entries_keep_their_steps(device_type, policy, tmp_path):
    table = make(device_type, 640, dim=1, eviction=policy)
    for clock in CLOCKS:
        table._group.set_clock(clock)
        table.find_or_insert(torch.arange(10, device=device_type) + clock)
    expected = entries_of(table)
    table.save(tmp_path)
    loaded = make(device_type, 640, dim=1, eviction=policy)
    loaded.load(tmp_path)
    assert entries_of(loaded) == expected
    copied = make(device_type, 640, dim=1, eviction=policy)
    copied._group.load_table(0, table._group.export_table(0))
    assert entries_of(copied) == expected
