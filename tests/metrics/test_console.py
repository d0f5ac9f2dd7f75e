"""The progress line."""

import io
import re
import sys

import pytest

from torchrec_hkv.metrics import ConsoleLine, TableMetrics, describe


class Terminal(io.StringIO):
    def isatty(self):
        return True


BEFORE = {"a": TableMetrics(lookups=100, hits=50, size=10, capacity=100)}
NOW = {
    "a": TableMetrics(lookups=200, hits=140, evicted=1234, size=20, capacity=100),
    "b": TableMetrics(lookups=100, hits=40, refused=7, size=30, capacity=100),
}


def test_metrics_in_a_few_words():
    expected = "hit rate 60.0%, load factor 0.25, evictions 1,234, refused 7"
    assert describe(NOW) == expected
    assert describe(NOW, BEFORE).startswith("hit rate 65.0%, load factor 0.25, evictions 1,234")
    assert describe({}) == ""


def test_hits_and_bytes_by_memory_where_there_are_two():
    now = {
        "a": TableMetrics(
            lookups=200, hits=150, host_hits=30, returned=5, hbm_bytes=1 << 30, host_bytes=3 << 29
        )
    }
    assert describe(now) == (
        "hit rate 75.0% (HBM 60.0%, host 15.0%), evictions 0, returned 5, 1.00 GiB of HBM, "
        "1.50 GiB of host memory"
    )


def test_without_a_terminal_the_last_state_is_printed_once(capsys):
    with ConsoleLine("run", 10, file=io.StringIO()) as line:
        line(1, BEFORE)
        line.update(2, samples=50, loss=0.51)
        line(2, NOW)
        line.update(3, samples=90, loss=0.25)
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.startswith("run: ")
    assert "samples/s, loss 0.2500, hit rate 65.0%, load factor 0.25" in printed


@pytest.mark.parametrize("steps", [10, None])
def test_a_terminal_sees_the_line_while_it_runs(steps, capsys):
    terminal = Terminal()
    with ConsoleLine("run", steps, file=terminal) as line:
        line(3, NOW)
        line.update(4, loss=0.25)
    assert "run" in terminal.getvalue()
    assert capsys.readouterr().out.startswith("run: loss 0.2500, hit rate")


def test_close_prints_the_last_state_once(capsys):
    line = ConsoleLine("run", 10, file=io.StringIO())
    line.update(1, loss=0.5)
    line.close()
    line.close()
    assert capsys.readouterr().out == "run: loss 0.5000\n"


def test_without_a_block_a_terminal_sees_the_line_too(capsys):
    terminal = Terminal()
    line = ConsoleLine("run", 10, file=terminal)
    line.update(1, loss=0.5)
    line.close()
    assert "1/10" in terminal.getvalue()
    assert capsys.readouterr().out == "run: loss 0.5000\n"


def test_a_closed_line_is_refused():
    line = ConsoleLine("run", 10, file=io.StringIO())
    line.close()
    for call in (lambda: line.update(1), lambda: line(1, NOW), line.__enter__):
        with pytest.raises(ValueError, match=r"ConsoleLine 'run' is closed: close a Watch before"):
            call()


@pytest.mark.parametrize("with_rich", [True, False])
def test_a_narrow_terminal_is_not_overrun(with_rich, monkeypatch):
    """With rich all figures are shown on separate lines; without it, the line is cut."""
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    with ConsoleLine("stock, a quarter, hashed", 10, file=terminal) as line:
        line.update(9, 100, **{"train loss": 0.25, "train AUC": 0.5, "test AUC": 0.75})
        line(9, NOW)
    shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", terminal.getvalue())
    drawn = re.split(r"[\r\n]", shown)
    assert max(map(len, drawn)) <= 60
    assert any("9/10" in part for part in drawn) == with_rich
    assert ("refused 7" in shown) == with_rich


def test_on_a_terminal_the_last_state_is_wrapped(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", output := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    with ConsoleLine("run", 10, file=io.StringIO()) as line:
        line.update(9, **{f"figure {i}": i / 7 for i in range(9)})
    first, *others = output.getvalue().splitlines()
    assert first.startswith("run: figure 0 0.0000")
    assert others
    assert all(len(part) <= 60 and part.startswith("  ") for part in others)
    assert "figure 8 1.1429" in others[-1]


def test_other_ranks_show_nothing(capsys):
    terminal = Terminal()
    with ConsoleLine("run", 10, shown=False, file=terminal) as line:
        line.update(1, loss=0.5)
    assert (terminal.getvalue(), capsys.readouterr().out) == ("", "")


def test_impossible_steps():
    with pytest.raises(ValueError, match="steps is -1, but must be None or at least 0"):
        ConsoleLine("training", -1)
