"""Online learning over a stream with new and expiring ids, run as a user does."""

import json
import shutil

import numpy as np
import pytest
from click_data import ClickLog, Column, DataError
from train_online import new_share, periods_of

from tests.support.example_runs import (
    kill_example,
    refusal,
    run_example,
    shared_file,
    write_ratings,
)


def log_of(days, rows_a_day=5):
    seconds = np.repeat(np.array(days) * 86400, rows_a_day)
    n = len(seconds)
    ids = np.arange(n) // 2
    column = Column("user", ids, np.ones(n, dtype=bool), open_ended=True)
    return ClickLog("log", np.zeros(n), np.zeros((n, 1)), [column], seconds)


def test_periods_are_of_days():
    assert periods_of(log_of([0, 1, 2, 3, 4, 5]), 2, 1) == [
        range(0, 10),
        range(10, 20),
        range(20, 30),
    ]


def test_a_period_that_is_too_short_joins_the_next():
    periods = periods_of(log_of([0, 1, 2, 3]), 1, 10)
    assert periods == [range(0, 10), range(10, 20)]


def test_a_log_without_times_is_cut_in_ten():
    log = log_of(range(20))
    log = ClickLog(log.name, log.labels, log.dense, log.columns)
    assert periods_of(log, 7, 1) == [range(10 * k, 10 * k + 10) for k in range(10)]


def test_one_period_is_refused():
    with pytest.raises(DataError, match="1 period of 7 days: name fewer days"):
        periods_of(log_of([0, 1]), 7, 1)


def test_share_of_new_ids():
    log = log_of([0, 1, 2])
    assert new_share(log, range(0, 5)) == 1.0
    assert new_share(log, range(5, 10)) == pytest.approx(0.8)  # id 2 occurred before


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    return write_ratings(tmp_path_factory.mktemp("ratings") / "ratings.dat")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_periods_get_better_and_ids_expire(processes, ratings, tmp_path):
    figures = tmp_path / "figures.json"
    done = run_example(
        "train_online.py",
        *("--data", ratings, "--days", 1, "--batch-size", 8, "--rows", 1.0),
        *("--expire-after", 2, "--json", figures),
        processes=processes,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(figures.read_text())
    periods = content["periods"]
    assert len(periods) == 28
    assert sum(period["rows"] for period in periods) == 4000
    assert sum(period["metrics"]["expired"] for period in periods) > 0
    assert np.mean([period["auc"] for period in periods[-5:]]) > 0.6
    assert f"AUC {content['auc']:.4f}" in done.stdout


@pytest.mark.slow
def test_real_ratings(tmp_path, device_type):
    path = shared_file("movietweetings_100k.dat")
    done = run_example(
        "train_online.py", "--data", path, "--limit", 4000, "--days", 2, device=device_type
    )
    assert done.returncode == 0, done.stderr
    assert "mean of the last" in done.stdout


@pytest.mark.slow
def test_bad_input_gets_one_sentence(ratings):
    assert "name fewer days" in refusal("train_online.py", "--data", ratings, "--days", 60)
    assert "'2' is not a number above 0" in refusal(
        "train_online.py", "--data", ratings, "--rows", 2
    )


def _auc_by_period(content):
    return {period["number"]: period["auc"] for period in content["periods"]}


@pytest.fixture(scope="module")
def killed(ratings, tmp_path_factory):
    """Arguments of a run, the AUC by period of an uninterrupted run, and the chain of a killed
    one."""
    folder = tmp_path_factory.mktemp("killed")
    chain, figures = folder / "chain", folder / "figures.json"
    arguments = ["--data", ratings, "--days", 1, "--batch-size", 16, "--expire-after", 2]
    whole = run_example("train_online.py", *arguments, "--json", figures, processes=2)
    assert whole.returncode == 0, whole.stderr
    wanted = _auc_by_period(json.loads(figures.read_text()))
    figures.unlink()
    its = [*arguments, "--json", figures, "--deltas", chain]
    kill_example("train_online.py", *its, processes=2, once=chain / "delta-000012")
    assert not figures.exists()
    return arguments, wanted, chain


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_a_killed_run_goes_on(processes, killed, tmp_path):
    """A resumed run has the AUC by period of an uninterrupted one, also with fewer processes."""
    arguments, wanted, left = killed
    chain, figures = tmp_path / "chain", tmp_path / "figures.json"
    shutil.copytree(left, chain)
    arguments = [*arguments, "--json", figures, "--deltas", chain]
    done = run_example("train_online.py", *arguments, processes=processes)
    assert done.returncode == 0, done.stderr
    found = _auc_by_period(json.loads(figures.read_text()))
    first = min(found)
    assert first >= 13
    assert list(found) == list(range(first, len(wanted) + 1))
    same = {number: wanted[number] for number in found}
    if processes == 2:
        assert found == same
    else:  # steps see other parts of the data, and an AUC is over some 140 rows
        assert found == pytest.approx(same, abs=0.05)
        assert np.mean(list(found.values())) == pytest.approx(
            np.mean(list(same.values())), abs=0.01
        )
    again = run_example("train_online.py", *arguments, processes=processes)
    assert again.returncode != 0
    assert "holds the state after the last period already" in again.stderr
