"""Two processes on one folder: exports do not mix, and a load during a replacement is
consistent."""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_hkv import serving
from torchrec_hkv.serving.export_folder import ExportFolder


class Two(nn.Module):
    """Two tables and a dense factor, all set to one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=n, embedding_dim=4, num_embeddings=100, feature_names=[n])
            for n in "ab"
        ]
        self.ebc = EmbeddingBagCollection(tables=tables)
        self.factor = nn.Parameter(torch.tensor(value))
        for bag in self.ebc.embedding_bags.values():
            nn.init.constant_(bag.weight, value)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([self.ebc(features).values(), self.factor.expand(2, 1)], dim=1)


FEATURES = KeyedJaggedTensor(
    keys=["a", "b"], values=torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.long)
)


def test_exports(tmp_path):
    """A second export is refused while the first one runs; what a killed one left is removed."""
    first = ExportFolder(tmp_path / "model")  # holds a separate lock, like another process
    first.open()
    (first.path / "part").touch()
    with pytest.raises(ValueError, match="another process exports to"):
        serving.export(Two(1.0), tmp_path / "model", inputs=(FEATURES,))
    assert (first.path / "part").exists()
    os.close(first._locks.pop())  # as if the process were killed
    serving.export(Two(1.0), tmp_path / "model", inputs=(FEATURES,))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "part").exists()


@pytest.mark.slow
def test_loads_while_replaced(tmp_path):
    """All numbers of a loaded model are of one export."""
    for value in range(3):
        serving.export(Two(float(value)), tmp_path / f"made-{value}", inputs=(FEATURES,))
    shutil.copytree(tmp_path / "made-0", tmp_path / "model")
    values, ended = set(), threading.Event()
    failures: list[Exception] = []

    def load() -> None:
        while not ended.is_set():
            try:
                out = serving.load(tmp_path / "model")(FEATURES)
            except ValueError as error:
                failures.append(error)
                return
            assert (out == out[0, 0]).all(), out
            values.add(float(out[0, 0]))

    loader = threading.Thread(target=load)
    loader.start()
    for number in range(12):
        folder = ExportFolder(tmp_path / "model")
        folder.open()
        shutil.copytree(tmp_path / f"made-{number % 3}", folder.path, dirs_exist_ok=True)
        folder.replace()
        folder.close()
        time.sleep(0.25)
    ended.set()
    loader.join()
    assert not failures, failures[0]
    assert values
    assert float(serving.load(tmp_path / "model")(FEATURES)[0, 0]) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "made-0",
        "made-1",
        "made-2",
        "model",
    ]
