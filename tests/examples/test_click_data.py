"""The click logs of the examples: what is read from a file, and what is refused."""

import zipfile

import numpy as np
import pytest
from click_data import MOVIELENS_MEMBER, DataError, mix64, read

EMPTY = np.zeros(0)
MOVIELENS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
196\t242\t3\t881250949
186\t302\t4\t881250900
196\t302\t5\t881254549
"""


def column(log, name):
    (found,) = [column for column in log.columns if column.name == name]
    return found


@pytest.fixture
def movielens(tmp_path):
    path = tmp_path / "data.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MOVIELENS_MEMBER, MOVIELENS)
    return path


def test_movielens_rows_are_in_order_of_time(movielens):
    log = read(movielens)
    assert column(log, "user").ids.tolist() == mix64(np.array([186, 196, 196])).tolist()
    assert column(log, "movie").ids.tolist() == mix64(np.array([302, 242, 302])).tolist()
    assert log.labels.tolist() == [1, 0, 1]


def test_movielens_hour_is_of_the_day(movielens):
    hours = column(read(movielens), "hour")
    assert hours.ids.tolist() == [881250900 // 3600 % 24] * 2 + [881254549 // 3600 % 24]
    assert not hours.open_ended


def test_inter_file_by_itself_gives_the_same(movielens, tmp_path):
    path = tmp_path / "ml-100k.inter"
    path.write_text(MOVIELENS)
    assert np.array_equal(read(path).dense, read(movielens).dense)


def test_movietweetings_label_is_a_rating_of_8_or_more(tmp_path):
    path = tmp_path / "tweets.dat"
    path.write_text("1::100::8::2000\n2::100::7::1000\n")
    assert read(path).labels.tolist() == [0, 1]


def test_criteo_missing_values_have_no_id_and_no_count(tmp_path):
    path = tmp_path / "clicks.npz"
    cat = np.arange(52).reshape(2, 26)
    cat[1, 3] = -1
    dense = np.full((2, 13), np.e - 1, dtype=np.float32)
    dense[0, 5] = np.nan
    np.savez(path, label=np.array([0, 1], dtype=np.uint8), dense=dense, cat=cat)
    log = read(path)
    assert column(log, "cat_3").present.tolist() == [True, False]
    assert log.dense[0, 5] == 0
    assert log.dense[1, 5] == pytest.approx(1)


def test_mixed_ids_are_distinct_and_use_all_64_bits():
    mixed = mix64(np.arange(10_000))
    assert len(np.unique(mixed)) == 10_000
    assert mixed.min() < -(2**62)
    assert mixed.max() > 2**62


def test_first_keeps_the_earliest_rows(movielens):
    log = read(movielens).first(2)
    assert len(log) == 2
    assert all(len(column.ids) == len(column.present) == 2 for column in log.columns)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("clicks.csv", "1,2,3,4", "unknown format"),
        ("clicks.inter", "user\tmovie\n1\t2\n", "must have the columns user_id:token"),
        ("clicks.inter", MOVIELENS + "1\t2\n", "row 4 is '1\t2'"),
        ("clicks.dat", "1::2::x::4\n", "row 1 is '1::2::x::4'"),
        ("clicks.dat", "", "holds no rows"),
        ("clicks.whl", "no zip", "is not a wheel"),
        ("clicks.npz", "no zip", "must hold the arrays label, dense, cat"),
        ("clicks.npz", "", "must hold the arrays label, dense, cat"),
        ("clicks.dat", b"\xff\xfe\x00", "is no text file, as its name says"),
        ("clicks.inter", b"\xff\xfe\x00", "is no text file, as its name says"),
        ("clicks.dat", f"{10**30}::2::3::4\n", "must have four numbers a row"),
        ("clicks.whl", b"", "is not a wheel"),
        ("train.txt", "\t".join(["1", *["3"] * 13, *["f" * 16] * 26]), "26 hexadecimal ids"),
        ("train.gz", "no gzip", "is no text file, or no gzip file"),
    ],
)
def test_bad_file_is_refused_in_one_sentence(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_criteo_of_another_shape_is_refused(tmp_path):
    path = tmp_path / "clicks.npz"
    np.savez(path, label=np.zeros(2), dense=np.zeros((2, 13)), cat=np.zeros((2, 25)))
    with pytest.raises(DataError, match=r"'cat' must be of shape \(2, 26\), not \(2, 25\)"):
        read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": np.array(1.0)}, r"'label' must be of shape \(0,\), not \(\)"),
        ({"label": np.array(["a", "b"])}, "'label' must hold numbers, not <U1"),
        ({"cat": np.zeros((2, 26))}, "'cat' must hold numbers, not float64"),
        ({"label": EMPTY, "dense": np.zeros((0, 13)), "cat": np.zeros((0, 26), int)}, "no rows"),
    ],
)
def test_criteo_of_other_contents_is_refused(tmp_path, changes, message):
    arrays = {"label": np.zeros(2), "dense": np.zeros((2, 13)), "cat": np.zeros((2, 26), int)}
    path = tmp_path / "clicks.npz"
    np.savez(path, **(arrays | changes))
    with pytest.raises(DataError, match=message):
        read(path)


def test_an_array_that_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "clicks.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="must hold the arrays label, dense, cat"):
        read(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="There is no data file"):
        read(tmp_path / "nothing.dat")
