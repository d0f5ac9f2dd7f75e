"""Which build of the extension is loaded."""

from __future__ import annotations

import pytest

from torchrec_hkv import cpu_variant


@pytest.fixture
def two_builds(monkeypatch, tmp_path):
    """An installation with a second build."""
    (tmp_path / "_v3").mkdir()
    (tmp_path / "_v3" / "_C.cpython.so").touch()
    monkeypatch.setattr(cpu_variant, "FOLDER", tmp_path)


def with_flags(monkeypatch, flags):
    monkeypatch.setattr(cpu_variant, "cpu_flags", lambda: set(flags))


@pytest.mark.parametrize("missing", sorted(cpu_variant.V3_FLAGS))
def test_v3_needs_all_its_instructions(monkeypatch, two_builds, missing):
    monkeypatch.delenv("TORCHREC_HKV_CPU_VARIANT", raising=False)
    with_flags(monkeypatch, cpu_variant.V3_FLAGS | {"sse4_2"})
    assert cpu_variant.chosen() == "v3"
    with_flags(monkeypatch, cpu_variant.V3_FLAGS - {missing})
    assert cpu_variant.chosen() == "v2"


def test_the_variable_comes_first(monkeypatch, two_builds):
    with_flags(monkeypatch, cpu_variant.V3_FLAGS)
    monkeypatch.setenv("TORCHREC_HKV_CPU_VARIANT", "v2")
    assert cpu_variant.chosen() == "v2"


def test_impossible_variants_are_refused(monkeypatch, two_builds):
    with_flags(monkeypatch, [])
    monkeypatch.setenv("TORCHREC_HKV_CPU_VARIANT", "v3")
    with pytest.raises(ValueError, match=r"CPU_VARIANT is 'v3', but must be v2"):
        cpu_variant.chosen()
    monkeypatch.setenv("TORCHREC_HKV_CPU_VARIANT", "v4")
    with pytest.raises(ValueError, match=r"CPU_VARIANT is 'v4', but must be v2 or v3"):
        cpu_variant.chosen()


def test_one_build(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHREC_HKV_CPU_VARIANT", raising=False)
    monkeypatch.setattr(cpu_variant, "FOLDER", tmp_path)
    with_flags(monkeypatch, cpu_variant.V3_FLAGS)
    assert cpu_variant.chosen() == "v2"


def test_flags_of_this_machine():
    assert "sse2" in cpu_variant.cpu_flags() or not cpu_variant.cpu_flags() & {"avx2"}
