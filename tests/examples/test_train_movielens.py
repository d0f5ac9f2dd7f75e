"""The MovieLens example, run as a user does: its table, JSON file and errors."""

import json

import numpy as np
import pytest

from tests.support.example_runs import refusal, run_example

SCRIPT = "train_movielens.py"
RUNS = ["stock", "hkv", "hkv-quarter", "hashed-quarter"]
ROWS, USERS, MOVIES = 4000, 120, 80


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A MovieTweetings file in which users like some movies and dislike others."""
    random = np.random.default_rng(0)
    users, movies = random.integers(USERS, size=ROWS), random.integers(MOVIES, size=ROWS)
    liked = random.random(ROWS) < np.where(movies % 2 == 0, 0.8, 0.2)
    lines = [
        f"{user}::{movie}::{9 if like else 3}::{1_360_000_000 + 600 * i}"
        for i, (user, movie, like) in enumerate(zip(users, movies, liked, strict=True))
    ]
    path = tmp_path_factory.mktemp("clicks") / "clicks.dat"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module", params=[None, 2], ids=["1 process", "2 processes"])
def trained(request, clicks, tmp_path_factory):
    """What the whole example printed and wrote."""
    path = tmp_path_factory.mktemp("json") / "figures.json"
    done = run_example(
        SCRIPT,
        *("--data", clicks, "--json", path, "--batch-size", 64, "--epochs", 1),
        processes=request.param,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text()), request.param or 1


@pytest.mark.slow
def test_hash_tables_with_room_for_all_ids_train_as_stock_tables_do(trained):
    _, figures, _ = trained
    runs = figures["runs"]
    assert runs["hkv"]["test_auc"] == pytest.approx(runs["stock"]["test_auc"], abs=0.002)
    assert runs["hkv"]["train_loss"] == pytest.approx(runs["stock"]["train_loss"], abs=1e-4)


def test_all_runs_learn_something(trained):
    _, figures, _ = trained
    assert figures["runs"]["stock"]["test_auc"] > 0.65
    assert all(figures["runs"][key]["test_auc"] > 0.52 for key in RUNS)


def test_hash_tables_with_room_for_all_ids_evict_nothing(trained):
    _, figures, _ = trained
    counters = figures["runs"]["hkv"]["counters"]
    assert counters["evicted"] == counters["refused"] == 0
    assert 0 < counters["size"] <= USERS + MOVIES


def test_small_hash_tables_evict(trained):
    _, figures, _ = trained
    counters = figures["runs"]["hkv-quarter"]["counters"]
    assert counters["evicted"] > 0
    assert counters["size"] <= counters["capacity"]


def test_json_says_what_was_run(trained):
    _, figures, processes = trained
    assert list(figures["runs"]) == RUNS
    assert figures["world_size"] == processes
    assert (figures["data"], figures["device"], figures["seed"]) == ("MovieTweetings", "cpu", 0)
    assert (figures["train_rows"], figures["test_rows"]) == (ROWS * 8 // 10, ROWS * 2 // 10)
    assert {"python", "torch", "torchrec", "torchrec-hkv"} <= set(figures["versions"])


def test_plan_progress_and_table_are_printed(trained):
    output, figures, _ = trained
    assert "row_wise" in output
    assert "eviction=lfu" in output
    assert "hit rate" in output
    for run in figures["runs"].values():
        (line,) = (x for x in output.splitlines() if x.startswith(f"{run['title']}: "))
        assert f"test AUC {run['test_auc']:.4f}" in line
        last = run["progress"][-1]
        assert f"train loss {last['loss']:.4f}, train AUC {last['auc']:.4f}" in line
        # Both AUCs are labelled: one is of training batches, the other of the test set.
        assert line.count("AUC") == 2


@pytest.mark.slow
def test_bad_input_is_refused_in_one_sentence(clicks):
    """Runs as a process; test_bad_input.py covers all kinds of bad input."""
    message = refusal(SCRIPT, "--data", clicks, "--limit", 100, "--batch-size", 81)
    assert message == "error: A batch of 81 rows is more than the 80 rows to train on."
