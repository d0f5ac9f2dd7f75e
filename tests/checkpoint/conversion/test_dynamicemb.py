"""Conversion of dynamicemb dumps keeps rows, states and scores. The test writes dumps itself, since
dynamicemb needs a GPU."""

from __future__ import annotations

import json

import numpy
import pytest
import torch

from tests.support.conversions import converted, entries_of

N, DIM, START = 200, 4, 0.25
NAME = "sparse.ebc.embedding_bags.user"
WIDTHS = {
    "sgd": ("sgd", 0),
    "adam": ("adam", 2 * DIM),
    "exact_adagrad": ("adagrad", DIM),
    "exact_row_wise_adagrad": ("rowwise_adagrad", 1),
}


def _dump(path, optimizer, strategy, scores, ranks=2, iters=7):
    """Key ``k`` belongs to rank ``k % ranks``; each file has raw values."""
    folder = path / "model.sparse.ebc"
    folder.mkdir(parents=True)
    keys = torch.randint(-(2**62), 2**62, (N,))
    rows, states = torch.randn(N, DIM), torch.rand(N, WIDTHS[optimizer][1])
    for rank in range(ranks):
        owned = keys % ranks == rank
        columns = {"keys": keys, "values": rows, "scores": scores, "opt_values": states}
        for item, tensor in columns.items():
            file = folder / f"user_emb_{item}.rank_{rank}.world_size_{ranks}"
            file.write_bytes(numpy.ascontiguousarray(tensor[owned].numpy()).tobytes())
    arguments = {
        "opt_type": optimizer,
        "lr": 0.1,
        "iters": iters,
        "initial_accumulator_value": START,
        "evict_strategy": f"EvictStrategy.{strategy}",
        "dist_type": "roundrobin",
        "step_score": 5,
    }
    (folder / "user_opt_args.json").write_text(json.dumps(arguments))
    return keys, rows, states


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("optimizer", WIDTHS)
def test_rows_and_states(tmp_path, optimizer, ranks):
    counts = torch.randint(1, 1000, (N,))
    keys, rows, states = _dump(tmp_path / "dump", optimizer, "KLfu", counts, ranks)
    saved = converted(tmp_path / "dump", tmp_path / "hkv")
    assert list(saved.tables) == [NAME]
    found, order = entries_of(saved, "user"), keys.argsort()
    kind, width = WIDTHS[optimizer]
    assert saved.tables[NAME].identity["optimizer"] == kind
    assert saved.tables[NAME].identity["eviction"] == "lfu"
    assert saved.tables[NAME].parts[0].manifest.optimizer_step == 7
    assert found["ids"].equal(keys[order])
    assert found["rows"].equal(rows[order])
    assert found["scores"].equal(counts[order])
    if width:
        # dynamicemb's Adagrad sums begin at the initial value, ours at 0.
        start = START if "adagrad" in kind else 0.0
        assert found["states"][:, :width].equal(states[order] - start)


def test_ages_keep_their_order(tmp_path):
    ages = torch.randperm(N) * 1_000_000_007
    keys, *_ = _dump(tmp_path / "dump", "sgd", "KLru", ages)
    saved = converted(tmp_path / "dump", tmp_path / "hkv")
    found = entries_of(saved, "user")
    assert "scores" not in found
    ordered = ages[keys.argsort()].argsort(descending=True)
    steps = found["last_steps"][ordered].long()
    assert (steps[1:] > steps[:-1]).all()
    clock = saved.tables[NAME].parts[0].manifest.clock
    assert (steps[0], steps[-1]) == (1, clock)


@pytest.mark.parametrize(("given", "kind"), [(None, "customized"), ("lru", "lru"), ("lfu", "lfu")])
def test_scores_are_what_is_said(tmp_path, given, kind):
    scores = torch.randint(1, 1 << 30, (N,))
    keys, *_ = _dump(tmp_path / "dump", "sgd", "KCustomized", scores)
    saved = converted(tmp_path / "dump", tmp_path / "hkv", eviction=given)
    assert saved.tables[NAME].identity["eviction"] == kind
    found = entries_of(saved, "user")
    values = found["last_steps"].long() if kind == "lru" else found["scores"]
    assert values.equal(scores[keys.argsort()])


def test_sequences_and_names(tmp_path):
    _dump(tmp_path / "dump", "sgd", "KLru", torch.arange(N))
    saved = converted(
        tmp_path / "dump", tmp_path / "hkv", sequences=True, renamed=[("sparse.ebc", "ec")]
    )
    assert list(saved.tables) == ["ec.embeddings.user"]


def test_refusals(tmp_path):
    path = tmp_path / "dump"
    _dump(path, "adam", "KEpochLfu", torch.arange(N))
    folder = path / "model.sparse.ebc"

    def refused(sentence, **options):
        with pytest.raises(ValueError, match=sentence):
            converted(path, tmp_path / "hkv", **options)
        assert not (tmp_path / "hkv").exists()

    refused("strategy 'KEpochLfu'")
    refused("has 3200 bytes, but|need", optimizer="rowwise_adagrad", eviction="lfu")
    values = folder / "user_emb_values.rank_1.world_size_2"
    whole = values.read_bytes()
    values.write_bytes(whole[:-4])
    refused("not a whole number of rows", without=["scores"])
    values.write_bytes(whole)
    converted(path, tmp_path / "fine", without=["scores"])
    (folder / "user_emb_keys.rank_1.world_size_2").unlink()
    refused("lacks user_emb_keys.rank_1.world_size_2", without=["scores"])
