"""If a call gives several scores for one id, the last one stays under policies that store given
scores."""

import pytest
import torch

from torchrec_hkv.hash_table import HashTable

CALLS = {
    "find_or_insert": lambda table, ids, scores: table.find_or_insert(ids, scores),
    "assign_scores": lambda table, ids, scores: table.assign_scores(ids, scores),
}


@pytest.fixture(params=[1, 2, 8])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_against_a_dictionary(device_type, threads, call, new):
    """Ids repeat across the whole call, so that several threads process each of them."""
    if new and call == "assign_scores":
        pytest.skip("it inserts nothing")
    table = HashTable(2, 1000, device=device_type, eviction="customized", deterministic=True)
    for round_ in range(10):
        if not new or round_ == 0:
            first = torch.arange(100, device=device_type)
            table.find_or_insert(first, torch.zeros_like(first))
        if new:
            table.clear()
        generator = torch.Generator().manual_seed(round_)
        ids = torch.randint(100, (50_000,), generator=generator)
        scores = torch.randint(1, 1 << 40, (50_000,), generator=generator)
        CALLS[call](table, ids.to(device_type), scores.to(device_type))
        expected = dict(zip(ids.tolist(), scores.tolist(), strict=True))
        (entries,) = table.export()
        kept = dict(zip(entries.ids.tolist(), entries.scores.tolist(), strict=True))
        assert kept == expected
