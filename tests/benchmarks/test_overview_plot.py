"""README's plot shows the results unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import overview_plot

PICTURE = Path(__file__).parents[2] / "docs" / "performance" / "overview.svg"


def test_picture_is_up_to_date(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "overview.svg"
    overview_plot.plot(drawn)
    assert drawn.read_text() == PICTURE.read_text(), (
        "run: python -m benchmarks overview_plot docs/performance/overview.svg"
    )
