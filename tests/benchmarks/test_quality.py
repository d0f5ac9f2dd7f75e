"""The quality benchmark: streams, tables and intervals; and it runs."""

from __future__ import annotations

import csv
import math

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import Bootstrap, predicted
from benchmarks.quality_data import auc
from benchmarks.quality_rows import DIM, HASHED, INT8, RATE, UNLIMITED, methods, rows_of
from benchmarks.quality_streams import REPLACED, TURNOVER, Stream, read, synthetic_stream
from torchrec_hkv import HKVOptions
from torchrec_hkv.replay import evictions

USERS, ITEMS = 60, 40


def test_streams_replace_their_ids():
    for how, minimum, maximum in ((TURNOVER, 0.6, 0.95), (REPLACED, 0.0, 0.0)):
        stream = synthetic_stream(how, seed=1)
        assert len(stream) == 120_000
        assert 0.3 < float(stream.labels.mean()) < 0.7
        for ids in stream.ids.values():
            first, second = ids[:12_000], ids[12_000:24_000]
            seen = float(torch.isin(second, first).double().mean())
            assert minimum <= seen <= maximum
    again = synthetic_stream(TURNOVER, seed=1)
    assert torch.equal(again.ids["user"], synthetic_stream(TURNOVER, seed=1).ids["user"])
    assert not torch.equal(again.labels, synthetic_stream(TURNOVER, seed=2).labels)


def test_read(tmp_path):
    tweets = tmp_path / "ratings.dat"
    tweets.write_text("2::7::9::20\n1::7::3::10\n2::8::8::30")
    stream = read(tweets)
    assert stream.labels.tolist() == [0, 1, 1]  # ordered by time
    user = stream.ids["user"].tolist()
    assert user[1] == user[2] != user[0]
    lens = tmp_path / "ml.inter"
    lens.write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n5\t6\t4\t9\n")
    stream = read(lens)
    assert (stream.labels.tolist(), stream.dense.shape) == ([1], (1, 4))
    with pytest.raises(ValueError, match=r"a.csv must be a .dat, .inter or .whl file"):
        read(tmp_path / "a.csv")


def small(rows=3000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    user = torch.randint(USERS, (rows,), generator=generator)
    item = torch.randint(ITEMS, (rows,), generator=generator)
    labels = ((item * 7 + 3) % 5 < 2).float()
    noise = torch.rand(rows, generator=generator) < 0.1
    labels = torch.where(noise, 1 - labels, labels)
    return Stream("small", {"user": user << 40, "item": item - 20}, torch.zeros(rows, 1), labels)


def test_tables_train_as_a_dictionary_does():
    """Every method with enough rows trains one row for each id, by row-wise Adagrad."""
    stream = small(200)
    counts = {"user": 4 * USERS, "item": 4 * ITEMS}
    for method in methods():
        if method == HASHED:
            continue
        tables = rows_of(method, counts, stream.ids, seed=3)
        seen: dict[tuple[str, int], torch.Tensor] = {}
        sums: dict[tuple[str, int], float] = {}
        for begin in range(0, 200, 20):
            ids = {name: values[begin : begin + 20] for name, values in stream.ids.items()}
            out = tables(ids)
            assert out.shape == (20, 2, DIM)
            gradient = torch.randn(out.shape)
            out.backward(gradient)
            for at, (name, values) in enumerate(ids.items()):
                total: dict[int, torch.Tensor] = {}
                for sample, ident in enumerate(values.tolist()):
                    row = seen.setdefault((name, ident), out[sample, at].detach().clone())
                    shown = out[sample, at].detach()
                    # Each of ten updates may round by a unit of int8; one unit may have been
                    # larger.
                    lost = 16 / 127 * float(row.abs().max()) if method.endswith(INT8) else 0.0
                    torch.testing.assert_close(shown, row, atol=lost + 1e-5, rtol=1e-5)
                    total[ident] = total.get(ident, 0) + gradient[sample, at]
                for ident, part in total.items():
                    key = (name, ident)
                    sums[key] = sums.get(key, 0.0) + float((part * part).mean())
                    seen[key] -= RATE / (math.sqrt(sums[key]) + 1e-8) * part


def test_rows_that_leave_start_anew():
    counts = {"user": 8}
    for method in methods():
        # Other policies of MCH map ids without a row to one shared row.
        if not method.startswith("hkv") and method != "MCH, LRU":
            continue
        tables = rows_of(method, counts, {}, seed=0)
        tables.train()
        for step in range(6):
            out = tables({"user": torch.arange(4) + 4 * step})
            assert float(out.abs().max()) <= 0.0101, method  # untrained: no row came back
            out.sum().backward()


def test_the_bootstrap_is_that_of_weighted_aucs():
    stream = small()
    scores = torch.randint(0, 50, (3000,)).float()
    found = Bootstrap(stream.ids["user"], stream.labels, resamples=3)
    labels = stream.labels.double()
    for weights, value in zip(found._weights, found.aucs(scores), strict=True):
        assert float(value) == pytest.approx(auc(scores, labels, weights), rel=1e-9)
        by_user = {int(u): set() for u in stream.ids["user"]}
        for user, weight in zip(stream.ids["user"].tolist(), weights.tolist(), strict=True):
            by_user[user].add(weight)
        assert all(len(weights) == 1 for weights in by_user.values())


def test_more_rows_are_better():
    stream = small(6000)
    aucs = {}
    for method, share in (
        (UNLIMITED, 1.0),
        (HASHED, 0.1),
        ("hkv, lfu", 2.0),
        ("hkv, lfu", 0.1),
    ):
        logits, hit_rate = predicted(stream, method, share, seed=0)
        aucs[method, share] = auc(logits[1200:], stream.labels[1200:].double())
        assert math.isnan(hit_rate) != method.startswith("hkv")
    assert aucs[UNLIMITED, 1.0] > 0.75
    assert aucs["hkv, lfu", 2.0] == pytest.approx(aucs[UNLIMITED, 1.0], abs=0.02)
    assert max(aucs[HASHED, 0.1], aucs["hkv, lfu", 0.1]) < aucs[UNLIMITED, 1.0] - 0.05


def test_policies_are_those_of_the_options():
    assert [f"hkv, {name}" for name in evictions() if not name.startswith("epoch")] == [
        name for name in methods() if name.startswith("hkv") and not name.endswith(INT8)
    ]
    assert f"hkv, {HKVOptions().eviction}" in methods()


def test_it_runs(tmp_path, capsys):
    out, picture = tmp_path / "quality.csv", tmp_path / "quality.svg"
    command = ["--made", "turnover", "--limit", "1500", "--shares", "0.5", "--seeds", "2"]
    command += ["--resamples", "10", "--methods", "hkv, lfu", HASHED, UNLIMITED]
    quality.main([*command, "--out", str(out), "--plot", str(picture)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    names = [row["method"] for row in rows]
    assert set(names) == {f"hkv, {HKVOptions().eviction}", "hkv, lfu", HASHED, UNLIMITED}
    for row in rows:
        assert float(row["low_95"]) <= float(row["difference"]) <= float(row["high_95"])
        if row["method"] == row["baseline"]:
            assert float(row["difference"]) == 0
    assert "turnover 50 %" in capsys.readouterr().out
    assert "</svg>" in picture.read_text()


def test_bad_input(tmp_path, capsys):
    for arguments, sentence in (
        (["--shares", "0"], "--shares has 0.0, but must be above 0"),
        (["--data", str(tmp_path / "no.dat")], "can't be read"),
        (["--baseline", "magic"], "invalid choice: 'magic'"),
    ):
        with pytest.raises(SystemExit):
            quality.main(arguments)
        assert sentence in capsys.readouterr().err
