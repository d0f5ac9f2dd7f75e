"""A bool requests deterministic mode, in any of three places."""

import pytest

from torchrec_hkv import HKVOptions
from torchrec_hkv.hash_table import HashTable, TableGroup, TableSpec

MAKERS = {
    "table 't'": lambda value: TableGroup([TableSpec("t", 64, 4, deterministic=value)], [0]),
    "table 'table'": lambda value: HashTable(4, 64, deterministic=value),
    "HKVOptions": lambda value: HKVOptions(deterministic=value),
}


@pytest.mark.parametrize("value", [None, 1, "yes"])
@pytest.mark.parametrize("where", MAKERS)
def test_anything_else_is_refused(where, value):
    with pytest.raises(ValueError, match="must be True or False") as error:
        MAKERS[where](value)
    assert str(error.value) == f"{where}: deterministic is {value!r}, but must be True or False."


def test_a_file_does_not_say(tmp_path):
    """A file saved with the option loads without it, and the other way round."""
    HashTable(4, 64, deterministic=True).save(tmp_path / "a")
    HashTable(4, 64).load(tmp_path / "a")
    assert not HashTable.from_file(tmp_path / "a").group.tables[0].deterministic
    table = HashTable.from_file(tmp_path / "a", deterministic=True)
    assert table.group.tables[0].deterministic
