"""Criteo's text files in their published format."""

import gzip

import numpy as np
import pytest
from click_data import DataError, mix64, read

from tests.support.example_runs import criteo_lines

COUNTS = ["1", "-1", "", *["0"] * 10]
IDS = ["0000000a", "", "ffffffff", *["1"] * 23]
LINE = "\t".join(["1", *COUNTS, *IDS])


@pytest.mark.parametrize("name", ["train.txt", "part.tsv", "day_0", "day_0.gz"])
def test_all_names_that_criteo_gives(name, tmp_path):
    path = tmp_path / name
    text = "\n".join([LINE, LINE.replace("1\t1", "0\t1", 1)]) + "\n"
    if name.endswith("gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    log = read(path)
    assert log.labels.tolist() == [1, 0]
    expected = np.log1p(np.array([1, 0, 0, *[0] * 10], dtype=np.float32))
    assert np.array_equal(log.dense[0], expected)
    assert log.columns[0].ids.tolist() == [10, 10]
    assert log.columns[2].ids.tolist() == [2**32 - 1] * 2
    assert [bool(column.present[0]) for column in log.columns[:3]] == [True, False, True]
    assert log.seconds is None


def test_a_column_of_many_ids_is_open_ended(tmp_path):
    path = tmp_path / "train.txt"
    lines = criteo_lines(1500)
    path.write_text("\n".join(lines))
    log = read(path)
    assert [column.open_ended for column in log.columns[:4]] == [False, True, False, False]
    first = int(lines[0].split("\t")[15], 16)
    assert log.columns[1].ids[0] == mix64(np.array([first]))[0]


def test_a_limit_reads_the_first_rows_only(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\n".join([LINE, LINE, "something else"]))
    assert len(read(path, 2)) == 2


BAD = {
    "no number": (LINE.replace("\t-1\t", "\tx\t"), "and row 1 is '1"),
    "no id": (LINE.replace("ffffffff", "gggggggg"), "and row 1 is '1"),
    "no label": (LINE.replace("1", "2", 1), "and row 1 is '2"),
    "too few fields": (LINE.rsplit("\t", 1)[0], "must have a label, 13 counts and 26 hexadecimal"),
    "empty": ("", "holds no rows"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_lines_are_refused_in_one_sentence(what, tmp_path):
    path = tmp_path / "train.txt"
    text, sentence = BAD[what]
    path.write_text(text)
    with pytest.raises(DataError, match=sentence):
        read(path)


def test_what_is_no_gzip_file_is_refused(tmp_path):
    path = tmp_path / "day_0.gz"
    path.write_text(LINE)
    with pytest.raises(DataError, match="is no text file, or no gzip file"):
        read(path)
