"""Every example refuses bad input with one sentence and exit code 2, before it does anything.

The examples run in this process, since they start nothing before they have checked their input.
"""

import importlib
import sys

import pytest
import torch
from launch import run

from tests.support.example_runs import criteo_lines, write_ratings

ON_LOGS = {
    "train_movielens": "main",
    "train_dlrm": "main",
    "train_deepfm": "main",
    "train_two_tower": "main",
    "train_online": "main",
    "train_sequence": "main",
    "compress_dlrm": "main",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_ratings(folder / "ratings.dat", rows=400)
    (folder / "clicks.txt").write_text("\n".join(criteo_lines(300)) + "\n")
    (folder / "broken.dat").write_text("1::2::3\n")
    (folder / "columns.inter").write_text("user\tmovie\n1\t2\n")
    (folder / "a_folder").mkdir()
    return folder


def refusal(name, arguments, monkeypatch, capsys):
    """Returns what an example prints; checks the exit code and the rest."""
    example = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    # train_dlrm and train_deepfm share a main, which their last lines call.
    call = example.main
    if name in ("train_dlrm", "train_deepfm"):
        architecture = name.removeprefix("train_")

        def call():
            return example.main(example.__doc__, architecture=architecture)

    assert run(call) == 2
    out, error = capsys.readouterr()
    assert out == "" or name == "billion_ids"  # which first prints what it will take
    assert error.startswith("error: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1
    return error


ARGUMENTS = {
    "There is no data file": ["--data", "{}/none.dat"],
    "There is no data file {}/a_folder.": ["--data", "{}/a_folder"],
    "must have four numbers a row": ["--data", "{}/broken.dat"],
    "must have the columns user_id:token": ["--data", "{}/columns.inter"],
    "is of an unknown format": ["--data", __file__],
    "Argument --batch-size: '0' is not a positive number.": ["--batch-size", "0"],
    "A batch of 100000 rows is more than": ["--batch-size", "100000"],
    "Argument --limit: 'x' is not a positive number.": ["--limit", "x"],
    "Argument --seed: '-1' is not a whole number": ["--seed", "-1"],
    "Argument --seed: '99999999999999999999'": ["--seed", "99999999999999999999"],
    "There is no folder {}/none.": ["--json", "{}/none/figures.json"],
    "--json is {}/a_folder, but that is a folder.": ["--json", "{}/a_folder"],
    "--tensorboard is {}/ratings.dat, but {}/ratings.dat is no folder.": [
        *("--tensorboard", "{}/ratings.dat")
    ],
    "--tensorboard is {}/clicks.txt/a, but {}/clicks.txt is no folder.": [
        *("--tensorboard", "{}/clicks.txt/a")
    ],
    "--tensorboard is /proc/none/a, but /proc can't be written to": [
        *("--tensorboard", "/proc/none/a")
    ],
    "/proc/none.json can't be written": ["--json", "/proc/none.json"],
    "Argument --batch-size: '99999999999999999999' is more than 2^62.": [
        *("--batch-size", "99999999999999999999")
    ],
    "Argument --device: invalid choice: 'tpu'": ["--device", "tpu"],
    "Unrecognized arguments: --fast.": ["--fast"],
}


@pytest.mark.parametrize("sentence", ARGUMENTS)
@pytest.mark.parametrize("name", ON_LOGS)
def test_examples_on_logs(name, sentence, files, monkeypatch, capsys):
    arguments = ["--data", files / "ratings.dat"]
    arguments += [text.format(files) for text in ARGUMENTS[sentence]]
    assert sentence.replace("{}", str(files)) in refusal(name, arguments, monkeypatch, capsys)


OWN = {
    "The following arguments are required: --data.": ("train_dlrm", []),
    "Argument --rows: 0.0 is not above 0": ("train_deepfm", ["--rows", "0"]),
    "Argument --epochs: '0' is not a positive number.": ("train_movielens", ["--epochs", "0"]),
    "Argument --runs: invalid choice: 'x'": ("train_movielens", ["--runs", "x"]),
    "--plot is auc.bmp, but must end with .png, .svg, .pdf.": (
        *("train_movielens", ["--plot", "auc.bmp"]),
    ),
    "There is no folder {}/no.": ("train_movielens", ["--plot", "{}/no/auc.png"]),
    "/proc/none.png can't be written": ("train_movielens", ["--plot", "/proc/none.png"]),
    "Argument -k: '-3' is not a positive number.": ("train_two_tower", ["-k=-3"]),
    "A batch of 300 is more than the likes to train on.": (
        *("train_two_tower", ["--batch-size", "300"]),
    ),
    "has no users and movies": (
        *("train_two_tower", ["--data", "{}/clicks.txt", "--batch-size", "32"]),
    ),
    "Argument --rows: '2' is not a number above 0": ("train_online", ["--rows", "2"]),
    "Argument --expire-after: '0' is not a positive number.": (
        *("train_online", ["--expire-after", "0"]),
    ),
    "Argument --order: invalid choice: 'x'": ("train_sequence", ["--order", "x"]),
    "--plot is a.bmp, but must end with .png, .svg, .pdf.": (
        *("train_sequence", ["--plot", "a.bmp"]),
    ),
    "Argument --seeds: '0' is not a positive number.": ("train_sequence", ["--seeds", "0"]),
    "Argument --error: not allowed with argument --rank.": (
        *("compress_dlrm", ["--rank", "4", "--error", "0.5"]),
    ),
    "Argument --tune-steps: '0' is not a positive number.": (
        *("compress_dlrm", ["--tune-steps", "0"]),
    ),
    "Argument --tune-dense-rate: '-1' is not a number from 0 to 1.": (
        *("compress_dlrm", ["--tune-dense-rate=-1"]),
    ),
    "Argument --optimizer: invalid choice: 'adam'": ("billion_ids", ["--optimizer", "adam"]),
    "There is no folder {}/none.": ("billion_ids", ["--json", "{}/none/figures.json"]),
    "Argument --ids: '0' is not a positive number.": ("billion_ids", ["--ids", "0"]),
    "embedding_dim is 4096, but must be an integer from 1 to 2048.": (
        "billion_ids",
        ["--dim", "4096", "--ids", "9"],
    ),
}


@pytest.mark.parametrize("sentence", OWN)
def test_arguments_of_one_example(sentence, files, monkeypatch, capsys):
    name, arguments = OWN[sentence]
    data = []
    if name != "billion_ids" and "required" not in sentence:
        data = ["--data", files / "ratings.dat"]
    elif name == "billion_ids":
        data = ["--device", "cpu"]
    given = [*data, *(text.format(files) for text in arguments)]
    assert sentence.replace("{}", str(files)) in refusal(name, given, monkeypatch, capsys)


@pytest.mark.parametrize("name", [*ON_LOGS, "billion_ids"])
def test_a_gpu_that_is_not_there(name, files, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    data = [] if name == "billion_ids" else ["--data", files / "ratings.dat"]
    error = refusal(name, [*data, "--device", "cuda"], monkeypatch, capsys)
    assert "GPU" in error


def test_an_interrupted_example(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert run(interrupted) == 130
    assert capsys.readouterr().err == "error: Interrupted.\n"


def test_a_file_that_could_be_written_is_not_left_behind(files, monkeypatch, capsys):
    """An example refused for another reason leaves no output file behind."""
    given = ["--data", files / "none.dat", "--json", files / "figures.json"]
    refusal("train_deepfm", given, monkeypatch, capsys)
    assert not (files / "figures.json").exists()
