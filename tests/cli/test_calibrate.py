"""``torchrec-hkv calibrate`` times tables on this device, and writes the file that planners
read."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support import toy_backend
from torchrec_hkv.backends import OptimizerSpec, registry
from torchrec_hkv.backends.calibration import CalibrationBatch, CalibrationCase
from torchrec_hkv.backends.constants import FIXED
from torchrec_hkv.cli import main
from torchrec_hkv.planner import Calibration
from torchrec_hkv.planner.calibration import VARIABLE

toy_backend.install()


@pytest.fixture
def toy_cases(monkeypatch):
    """Adds a timed case for the toy backend."""
    cases = [
        CalibrationCase(
            toy_backend.ToyOptions(),
            rows=300,
            capacity=400,
            dim=4,
            optimizer=OptimizerSpec("sgd"),
            batches=(
                CalibrationBatch(8, 1),
                CalibrationBatch(64, 1),
                CalibrationBatch(256, 1),
                CalibrationBatch(64, 4),
                CalibrationBatch(64, 4, 4.0),
            ),
            size=1e4,
            tables=tables,
        )
        for tables in (1, 3)
    ]
    toy = registry.get("toy")
    monkeypatch.setattr(type(toy), "calibration_cases", lambda self, device_type: cases)


@pytest.mark.slow
def test_a_backend_of_ones_own(toy_cases, tmp_path, capsys):
    path = tmp_path / "constants.json"
    threads = torch.get_num_threads()
    try:
        arguments = ["calibrate", "--kernel", "toy", "--device", "cpu", "--threads", "1"]
        assert main([*arguments, "--out", str(path), "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    out, err = capsys.readouterr()
    assert json.loads(out)["file"] == str(path)
    assert err.count("toy: 300 rows of 4, sgd") == 2
    measured = Calibration.load(path)
    assert (measured.device_type, measured.threads) == ("cpu", 1)
    (fit,) = measured.constants["toy"].fits
    for constants in (fit.forward, fit.backward):
        assert set(constants) == {"ids", "id_bytes", "bag_bytes", "distinct", "row_bytes", FIXED}
        assert sum(constants.values()) > 0


@pytest.mark.slow
def test_the_default_place(toy_cases, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "told.json"))
    assert main(["calibrate", "--kernel", "toy", "--device", "cpu"]) == 0
    assert f"toy measured, written to {tmp_path / 'told.json'}." in capsys.readouterr().out
    assert Calibration.load(tmp_path / "told.json").constants.keys() == {"toy"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "hkw"], "'hkw' can't be calibrated: allowed are"),
        (["--kernel", "toy"], "'toy' has no calibration cases"),
        (["--threads", "0"], "--threads is '0', but must be a whole number"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["calibrate", "--device", "cpu", "--out", str(tmp_path / "c.json"), *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nowhere_to_write(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(SystemExit):
        main(["calibrate", "--device", "cpu"])
    assert "--out is missing and TORCHREC_HKV_CALIBRATION is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "but that is a folder"),
        ("file/c.json", "can't be written to: Not a directory."),
        ("/proc/none/c.json", "but /proc can't be written to"),
    ],
)
def test_a_place_that_can_not_be_written_is_refused_before_measuring(
    toy_cases, out, message, tmp_path, capsys
):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        main(["calibrate", "--device", "cpu", "--kernel", "toy", "--out", str(tmp_path / out)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out is {tmp_path / out}, but ")
    assert message in error
    assert error.count("\n") == 1  # no progress line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_command(toy_cases, monkeypatch, tmp_path, capsys):
    def interrupted(self, device_type):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(registry.get("toy")), "calibration_cases", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["calibrate", "--device", "cpu", "--kernel", "toy", "--out", str(tmp_path / "c.json")])
    assert end.value.code == 130
    assert capsys.readouterr().err.endswith("error: Interrupted.\n")
    assert not list(tmp_path.iterdir())
