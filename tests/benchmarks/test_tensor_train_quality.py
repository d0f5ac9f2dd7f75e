"""The quality benchmark: its AUC, intervals and selection are correct, and it runs."""

import csv
import itertools
import random
import statistics

import pytest
import torch

from benchmarks import quality_plot, tensor_train_quality
from benchmarks.quality_data import auc, bootstrap, read_ratings
from benchmarks.quality_model import Choice, Variant, bytes_of, options_of, order_of, ordered_ids

ROWS, USERS, MOVIES = 3000, 80, 60


@pytest.fixture
def data(tmp_path):
    """Ratings that depend on the movie, not ordered by time."""
    draw = random.Random(1)
    lines = []
    for second in range(ROWS):
        movie = draw.randrange(MOVIES)
        rating = 9 if movie % 3 == 0 else draw.choice([3, 7, 8])
        lines.append(f"{draw.randrange(USERS) + 1}::{movie + 100}::{rating}::{second * 60}")
    draw.shuffle(lines)
    path = tmp_path / "ratings.dat"
    path.write_text("\n".join(lines))
    return path


def test_read(data):
    log = read_ratings(data)
    assert log.sizes == {"user": USERS, "movie": MOVIES, "hour": 24}
    assert (log.train, log.end) == (2400, 3000)
    times = [int(line.rsplit("::", 1)[1]) for line in data.read_text().splitlines()]
    assert log.ids["hour"].tolist() == [second % 86400 // 3600 for second in sorted(times)]
    part = log.for_validation()
    assert (part.train, part.end) == (1920, 2400)
    data.write_text("1::2::three::4")
    with pytest.raises(ValueError, match=r"row 1 is '1::2::three::4'"):
        read_ratings(data)


def test_auc_is_that_of_all_pairs():
    scores, labels = torch.randint(0, 7, (60,)).float(), torch.randint(0, 2, (60,)).double()
    weights = torch.randint(0, 4, (60,)).double()
    won = pairs = 0.0
    for i, j in itertools.product(range(60), repeat=2):
        if labels[i] == 1 and labels[j] == 0:
            weight = float(weights[i] * weights[j])
            pairs += weight
            won += weight * (float(scores[i] > scores[j]) + 0.5 * float(scores[i] == scores[j]))
    assert auc(scores, labels, weights) == pytest.approx(won / pairs, rel=1e-12)


def test_intervals_are_wider_where_rows_of_a_user_are_alike(data):
    """The median of several draws is compared, because one draw has too few users."""
    log = read_ratings(data)

    def width(labels, scores):
        changed = type(log)(**{**vars(log), "labels": labels})
        mean, spread, low, high = bootstrap(changed, scores, 200)
        assert low < mean < high
        assert spread > 0
        return high - low

    ratios = []
    for _ in range(5):
        noise = torch.randn(log.end - log.train)
        per_user = torch.randn(USERS)[log.ids["user"][log.train :]]
        scores = [noise + per_user, noise]
        alike = torch.cat([log.labels[: log.train], (per_user > 0).float()])
        mixed = torch.cat([log.labels[: log.train], (noise > 0).float()])
        ratios.append(width(alike, scores) / width(mixed, scores))
    assert statistics.median(ratios) > 1.3


@pytest.mark.parametrize("order", ["frequency", "label"])
def test_orders_know_nothing_of_the_test(data, order):
    log = read_ratings(data)
    ids = ordered_ids(log, Variant("", order=order))
    flipped = torch.cat([log.labels[: log.train], 1 - log.labels[log.train :]])
    other = ordered_ids(type(log)(**{**vars(log), "labels": flipped}), Variant("", order=order))
    assert all(torch.equal(ids[name], other[name]) for name in ids)
    assert torch.equal(ids["hour"], log.ids["hour"])
    assert not torch.equal(ids["movie"], log.ids["movie"])


def test_bytes_count_cores_and_hot_rows(data):
    log = read_ratings(data)
    assert bytes_of(log, None, 1.0, Choice(0.1, 0)) == 64 * (USERS + MOVIES)
    variant = Variant("", hot_share=0.5)
    options = options_of(log, "user", variant, 5.0, 2)
    assert options.cache_size == int(0.5 * (64 * USERS / 5) / 72)
    cores = options.shape(USERS, 16).num_elements
    assert 4 * cores + 72 * options.cache_size <= 64 * USERS / 5


def test_hot_rows_of_one_column_only(data):
    log = read_ratings(data)
    variant = Variant("", hot_share=0.5, hot_columns=("movie",))
    assert options_of(log, "user", variant, 5.0, 2).cache_size == 0
    assert options_of(log, "movie", variant, 5.0, 2).cache_size > 0


def test_an_order_with_a_share_is_counted(data):
    log = read_ratings(data)
    variant = Variant("", order="frequency", order_share=0.02)
    order = order_of(log, "user", variant, 2.0)
    assert 0 < order.num_listed < USERS
    budget = 64 * USERS // 2
    assert order.num_bytes <= 0.02 * budget
    options = options_of(log, "user", variant, 2.0, 2)
    assert options.max_bytes == budget - order.num_bytes
    ids = ordered_ids(log, variant, 2.0)
    assert torch.equal(order.ids_of(ids["user"]), log.ids["user"])
    sizes = [
        4 * options_of(log, column, variant, 2.0, 2).shape(log.sizes[column], 16).num_elements
        + order_of(log, column, variant, 2.0).num_bytes
        for column in ("user", "movie")
    ]
    assert bytes_of(log, variant, 2.0, Choice(0.1, 2)) == sum(sizes)


def test_runs(data, tmp_path):
    out, threads = tmp_path / "out.csv", torch.get_num_threads()
    names = ["plain", "hot rows", "order by mean label"]
    try:
        tensor_train_quality.main(
            [
                *("--data", str(data), "--seeds", "2", "--choosing-seeds", "1", "--epochs", "2"),
                *("--ratios", "3", "--variants", *names, "--resamples", "20", "--out", str(out)),
            ]
        )
    finally:
        torch.set_num_threads(threads)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["dense", *names]
    assert all(float(row["low_95"]) <= float(row["auc"]) <= float(row["high_95"]) for row in rows)
    assert all(float(row["ratio"]) >= 3 for row in rows[1:])


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"auc": "0.7", "low_95": "0.69", "high_95": "0.71"}
    rows = [{**row, "variant": "dense", "ratio": "1"}, {**row, "variant": "plain", "ratio": "9"}]
    table, picture = tmp_path / "rows.csv", tmp_path / "rows.svg"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    quality_plot.main([str(table), str(picture)])
    first = picture.read_text()
    quality_plot.main([str(table), str(picture)])
    assert picture.read_text() == first
    assert "svg" in first
