"""The billion-id example, with fewer ids."""

import json
import re

import pytest

from tests.support.example_runs import refusal, run_example


def bytes_after(word, text):
    found = re.search(rf"{word} [^(]*\(([0-9,]+) bytes of HBM, ([0-9,]+) of host memory\)", text)
    return sum(int(number.replace(",", "")) for number in found.groups())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_it_holds_all_ids_in_the_bytes_it_stated(optimizer, device_type, tmp_path):
    figures = tmp_path / "figures.json"
    done = run_example(
        "billion_ids.py",
        *("--ids", 50_000, "--batch-size", 20_000, "--optimizer", optimizer, "--json", figures),
        device=device_type,
    )
    assert done.returncode == 0, done.stderr
    assert "held 50,000 of 50,000 ids" in done.stdout
    assert "evicted 0, refused 0" in done.stdout
    stated, taken = (bytes_after(word, done.stdout) for word in ("will take", "took"))
    per_row = 14 + 4 * 16 * (2 if optimizer == "adagrad" else 1)
    assert stated == pytest.approx(50_000 / 0.9 * per_row, rel=0.01)
    assert taken == pytest.approx(stated, rel=0.05)
    content = json.loads(figures.read_text())
    assert (content["ids"], content["stated_bytes"], content["failures"]) == (50_000, stated, [])


@pytest.mark.slow
def test_processes_share_the_ids():
    done = run_example("billion_ids.py", "--ids", 50_001, processes=2)
    assert done.returncode == 0, done.stderr
    assert "held 25,000 of 25,000 ids" in done.stdout
    assert "held 25,001 of 25,001 ids" in done.stdout


@pytest.mark.slow
def test_too_many_ids_get_one_sentence():
    message = refusal("billion_ids.py", "--ids", 10**13)
    assert "init_capacity is 11,111,111,111,111, but the free or allowed memory" in message


@pytest.mark.slow
def test_help():
    done = run_example("billion_ids.py", "--help")
    assert done.returncode == 0
    assert "a billion ids in one embedding" in done.stdout
