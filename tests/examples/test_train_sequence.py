"""Next-item prediction, run as a user does: hash tables beside stock tables, known and new ids."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from click_data import ClickLog, Column
from sequence_data import Events, Sampler, last_events, without_last
from sequence_model import sampled_softmax

from tests.support.example_runs import refusal, run_example, shared_file, write_ratings


def write_chains(path, users=150, length=24, items=60):
    """Users go through items in steps of 7 from a random start. The next item follows from the last
    one; popularity tells nothing."""
    random = np.random.default_rng(0)
    begin = random.integers(items, size=users)
    lines = []
    for at in range(length):
        for user in random.permutation(users):
            item = (begin[user] + 7 * at) % items
            lines.append(f"{user}::{item}::9::{len(lines)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def _figures(path):
    return {key: scores[0] for key, scores in json.loads(path.read_text())["runs"].items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "processes", "more"),
    [
        ("known", None, ["--epochs", 12, "--batch-size", 32]),
        ("time", None, ["--batch-size", 32]),
        ("time", 2, ["--batch-size", 32, "--runs", "hkv"]),
        ("known", 2, ["--epochs", 1, "--batch-size", 32]),
    ],
)
def test_chains_are_learned(order, processes, more, tmp_path):
    done = run_example(
        "train_sequence.py",
        *("--data", write_chains(tmp_path / "chains.dat"), "--json", tmp_path / "figures.json"),
        *("--order", order, "--length", 8, "--candidates", 16, *more),
        processes=processes,
    )
    assert done.returncode == 0, done.stderr
    scores = _figures(tmp_path / "figures.json")
    assert scores["hkv"]["items"] == 60
    assert f"{scores['hkv']['recall']:.4f}" in done.stdout
    if "stock" in scores:
        assert scores["hkv"]["recall"] == pytest.approx(scores["stock"]["recall"], abs=0.05)
        assert "hkv - stock: recall@10" in done.stdout
    # Among some 50 items that a user has not chosen, ten random ones include the next item with a
    # probability of 20 %.
    if order == "time" or processes is None:
        assert scores["hkv"]["recall"] > 0.35
    assert 0 < scores["hkv"]["ndcg"] <= scores["hkv"]["recall"]


@pytest.mark.slow
def test_real_ratings_in_time(tmp_path, device_type):
    done = run_example(
        "train_sequence.py",
        *("--data", shared_file("movietweetings_100k.dat"), "--limit", 6000, "--order", "time"),
        *("--json", tmp_path / "figures.json", "--plot", tmp_path / "recall.svg", "--seeds", 2),
        *("--rows", 1),
        device=device_type,
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert [len(scores) for scores in runs.values()] == [2, 2]
    for key in ("recall", "ndcg"):
        hkv, stock = (np.mean([score[key] for score in runs[run]]) for run in ("hkv", "stock"))
        assert abs(hkv - stock) < 0.005
    assert "±" in done.stdout
    assert "<svg" in (tmp_path / "recall.svg").read_text()


@pytest.mark.slow
def test_bad_input_gets_one_sentence(tmp_path):
    ratings = write_ratings(tmp_path / "ratings.dat", rows=100, users=400)
    message = refusal("train_sequence.py", "--data", ratings, "--batch-size", 60)
    assert "which is less than a batch of 60: use more rows." in message
    message = refusal("train_sequence.py", "--data", ratings, "--batch-size", 50, "--order", "time")
    assert "which is less than five batches of 50: use more rows." in message


def _events(users, items):
    always = np.ones(len(users), dtype=bool)
    columns = [
        Column("user", np.array(users), always, True),
        Column("movie", np.array(items), always, True),
    ]
    count = len(users)
    return Events.of(ClickLog("made up", np.zeros(count), np.zeros((count, 1)), columns))


def test_histories():
    events = _events([7, 7, 3, 7, 3, 7], [1, 2, 3, 4, 5, 6])
    assert events.last(3, 10).tolist() == [1, 2]
    assert events.last(5, 2).tolist() == [2, 4]
    assert events.last(0, 2).tolist() == []
    assert events.last(4, 9).tolist() == [3]
    assert last_events(events).tolist() == [5]  # the other user has two choices
    pieces = [piece.tolist() for piece in without_last(events, 1)]
    assert pieces == [[1, 2], [2, 4]]
    assert [p.tolist() for p in without_last(events, 9)] == [[1, 2, 4]]


def test_each_item_but_the_first_is_predicted_once():
    items = list(range(23))
    events = _events([1] * len(items), items)
    for length in range(1, 30):
        pieces = without_last(events, length)
        predicted = [item for piece in pieces for item in piece[1:]]
        assert predicted == items[1:-1]
        assert all(2 <= len(piece) <= length + 1 for piece in pieces)


def test_samples_come_as_often_as_items_did():
    sampler = Sampler(0)
    sampler.add(np.array([5, -3, 5]))
    sampler.add(np.array([1 << 62, 5]))
    assert sampler.known.tolist() == [5, -3, 1 << 62] or sampler.known.tolist() == [-3, 5, 1 << 62]
    numbers = sampler.number(np.array([5, -3, 1 << 62, 8]))
    assert sampler.known[numbers[:3]].tolist() == [5, -3, 1 << 62]
    assert numbers[3] == 3
    found = sampler.sample(10_000)
    assert (found == 5).mean() == pytest.approx(0.6, abs=0.02)
    shares = sampler.log_share(np.array([5, -3, 8])).exp()
    assert shares.tolist() == pytest.approx([4 / 9, 2 / 9, 1 / 9])


def test_the_loss_is_that_of_the_softmax_over_target_and_candidates():
    generator = torch.Generator().manual_seed(0)
    vectors, rows = (torch.randn(3, 4, generator=generator) for _ in range(2))
    others = torch.randn(5, 4, generator=generator)
    targets, candidates = torch.tensor([1, 2, 3]), torch.tensor([3, 9, 1, 1, 8])
    own, share = (torch.randn(n, generator=generator) for n in (3, 5))
    loss = sampled_softmax(vectors, targets, rows, candidates, others, own, share)
    total = 0.0
    for i in range(3):
        right = math.exp(float(vectors[i] @ rows[i]) - float(own[i]))
        rest = [
            math.exp(float(vectors[i] @ others[j]) - float(share[j]))
            for j in range(5)
            if candidates[j] != targets[i]
        ]
        total -= math.log(right / (right + sum(rest)))
    assert float(loss) == pytest.approx(total / 3, rel=1e-5)
