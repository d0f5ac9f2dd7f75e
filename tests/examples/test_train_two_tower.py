"""Two towers, run as a user does, and their recall."""

import json

import numpy as np
import pytest
import torch
from train_two_tower import Likes, recalls

from tests.support.example_runs import refusal, run_example, shared_file, write_ratings


def write_tastes(path):
    """Users like movies of their own kind, one of four; popularity tells nothing."""
    random = np.random.default_rng(0)
    user = random.integers(200, size=6000)
    movie = 4 * random.integers(25, size=6000) + user % 4
    lines = [f"{u}::{m}::9::{i}" for i, (u, m) in enumerate(zip(user, movie, strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_recall_is_better_than_that_of_the_most_liked_items(processes, tmp_path):
    figures = tmp_path / "figures.json"
    done = run_example(
        "train_two_tower.py",
        *("--data", write_tastes(tmp_path / "tastes.dat"), "--json", figures),
        *("-k", 15, "--epochs", 20, "--batch-size", 64),
        processes=processes,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text())
    # 25 of 100 movies are of a user's kind.
    assert result["recall"] > 1.5 * result["popular"]
    assert f"recall@15 {result['recall']:.4f}" in done.stdout
    assert "hit rate" in done.stdout


@pytest.mark.slow
def test_real_ratings(tmp_path, device_type):
    done = run_example(
        "train_two_tower.py",
        *("--data", shared_file("movietweetings_100k.dat"), "--limit", 4000, "--epochs", 1),
        device=device_type,
    )
    assert done.returncode == 0, done.stderr
    assert "recall@50" in done.stdout


class _Vectors:
    """A model with given vectors."""

    def __init__(self, users, items):
        self.module = self
        self.user, self.item = (lambda ids: users[ids]), (lambda ids: items[ids])

    def eval(self):
        return self


def test_recall_of_given_vectors(run_ranks):
    (result,) = run_ranks(1, _recall)
    # User 0 liked 0 before, and later 1, which the model ranks before 2. User 1 liked 2 before, and
    # later 1, which the model ranks after 0. User 9 is new.
    assert result["recall"] == pytest.approx(0.5)
    assert (result["users"], result["items"]) == (2, 3)
    # The most popular of the others is 1 for both.
    assert result["popular"] == pytest.approx(1.0)


def _recall(rank, world_size, device):
    users = torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 0.0]], device=device)
    items = torch.tensor([[3.0, 3.0], [2.0, 1.0], [1.0, 2.0]], device=device)
    train = Likes(np.array([0, 2, 2, 1, 2]), np.array([0, 1, 1, 2, 1]))
    later = Likes(np.array([0, 1, 9]), np.array([1, 1, 1]))
    return recalls(_Vectors(users, items), train, later, 1, device)


@pytest.mark.slow
def test_bad_input_gets_one_sentence(tmp_path):
    ratings = write_ratings(tmp_path / "ratings.dat", rows=400)
    message = refusal("train_two_tower.py", "--data", ratings, "--batch-size", 300)
    assert "is more than the likes to train on" in message
    # Later likes are of the movie that the users liked before.
    (tmp_path / "again.dat").write_text("".join(f"{s % 3}::7::9::{s}\n" for s in range(60)))
    message = refusal("train_two_tower.py", "--data", tmp_path / "again.dat", "--batch-size", 8)
    assert "has no later likes of known users and movies to recall: use more rows." in message
    path = tmp_path / "train.txt"
    path.write_text("\n".join(["\t".join(["0", *["1"] * 39])] * 400))
    assert "has no users and movies" in refusal("train_two_tower.py", "--data", path)
