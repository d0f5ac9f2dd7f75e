"""Bad input: exit code 2 and one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_hkv.cli import main
from torchrec_hkv.cli.sizes import parse_bytes, parse_count

ROOT = Path(__file__).resolve().parents[2]
TABLE = ["plan", "--table", "user:1M:64"]

SENTENCES = {
    "A verb is missing: calibrate or compact or convert or diff or env or": [],
    "or plan or replay or verify; --help says more.": [],
    "The following arguments are required: --table.": ["plan"],
    "--table is 'user:1M', but must be NAME:ROWS:DIM, such as user:1B:64.": [
        *("plan", "--table", "user:1M")
    ],
    "The number of rows of table 'user' is '0', but must be a whole number such as": [
        *("plan", "--table", "user:0:64")
    ],
    "The dim of table 'user' is '6.5', but must be a whole number": [
        *("plan", "--table", "user:1M:6.5")
    ],
    "Tables must have different names, but they are user, user.": [
        *TABLE,
        *("--table", "user:2M:64"),
    ],
    "--hbm is 'much', but must be a size such as 80GiB": [*TABLE, "--hbm", "much"],
    "--gpus is '-1', but must be a whole number": [*TABLE, "--gpus=-1"],
    "--gpus is 5000, but must be at most 4096.": [*TABLE, "--gpus", "5000"],
    "Argument --optimizer: invalid choice: 'lion'": [*TABLE, "--optimizer", "lion"],
    "which is neither a registered backend": [*TABLE, "--backend", "magic"],
    "--hbm-per-table needs backend 'hkv', but --backend is 'fused': leave one out.": [
        *TABLE,
        *("--backend", "fused", "--hbm-per-table", "1GiB"),
    ],
    "embedding_dim is 4096, but backend 'hkv' takes 1 to 2048.": [
        "plan",
        "--table",
        "user:1M:4096",
    ],
    "num_embeddings is 3, but must be at least 1 for each rank that holds rows": [
        *("plan", "--table", "u:3:4", "--gpus", "8")
    ],
    "hbm_bytes is 1048576, but": [*TABLE, "--hbm-per-table", "1MiB"],
    "Unrecognized arguments: --fast.": ["env", "--fast"],
    "The number of rows of table 'u' is '1e400', but must be": ["plan", "--table", "u:1e400:64"],
    "The dim of table 'u' is '1e30', but must be less than 2^60.": [
        *("plan", "--table", "u:1M:1e30")
    ],
    "Table 'u' has 1,000,000,000,000,000,000 values, but must have fewer than 2^58.": [
        *("plan", "--table", "u:1e15:1e3")
    ],
    "The name of table 'u.x' has a dot": ["plan", "--table", "u.x:1M:64"],
    "--host is '1e30TiB', but must be less than 2^60.": [*TABLE, "--host", "1e30TiB"],
    "--batch-size is 3000000000, but must be less than 2^31.": [*TABLE, "--batch-size", "3B"],
    "TorchRec has no kernel 'dense' for these tables sharded row_wise": [
        *TABLE,
        *("--backend", "dense"),
    ],
    "Argument VERB: invalid choice: 'bogus'": ["bogus"],
    "--sharding is 'row_wise', but backend 'tt' is sharded data_parallel or table_wise.": [
        *TABLE,
        *("--backend", "tt", "--sharding", "table_wise", "--sharding", "row_wise"),
    ],
    "Argument --sharding: invalid choice: 'rows' (choose from": [*TABLE, "--sharding", "rows"],
    "TorchRec has no kernel 'fused_uvm' for these tables sharded data_parallel": [
        *TABLE,
        *("--backend", "fused_uvm", "--sharding", "data_parallel"),
    ],
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_one_sentence(sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(SENTENCES[sentence])
    assert stopped.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert sentence in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["log", "log.csv"])
def test_names_of_files_are_kept(name, capsys, tmp_path, monkeypatch):
    """Sentences begin with a capital, but a file's name is not changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(SystemExit):
        main(["replay", name, "--rows", "10"])
    assert capsys.readouterr().err == f"error: {name} is empty, but a log must have a line.\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("1_000", 1000),
        ("1,000", 1000),
        ("1e9", 10**9),
        ("1.5B", 15 * 10**8),
        ("2k", 2000),
    ],
)
def test_counts(text, number):
    assert parse_count("n", text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("2", 2 << 30), ("1.5GiB", 3 << 29), ("512mib", 1 << 29), ("1 TiB", 1 << 40)],
)
def test_sizes(text, number):
    assert parse_bytes("size", text) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1e", "1Q", "nan", "1.5", "1e400"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match=r"n is .*, but must be a whole number"):
        parse_count("n", text)


@pytest.mark.parametrize("arguments", [["--help"], ["env", "--help"], ["plan", "--help"]])
def test_help_and_version(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert "torchrec-hkv" in capsys.readouterr().out


@pytest.mark.slow
def test_it_runs_as_a_module():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_hkv", *TABLE, "--hbm", "x"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: --hbm is 'x'")
    assert "Traceback" not in done.stderr
