"""Modules can move only between devices."""

import copy

import pytest
import torch

from tests.support.embeddings import make_embedding
from tests.support.gpu import needs_gpu
from tests.support.saved_embeddings import rows, train
from torchrec_hkv import HKVAdamOptimizer


@needs_gpu
def test_a_module_moves_to_a_gpu_and_back():
    module = torch.nn.Sequential(make_embedding())
    optimizer = HKVAdamOptimizer(module[0], lr=0.1)
    train([module[0]], optimizer, range(3))
    twin = copy.deepcopy(module)
    expected = rows(twin[0])
    module.to("cuda")
    assert module[0].device.type == "cuda"
    assert torch.equal(rows(module[0]), expected)
    train([module[0]], optimizer, range(3, 5))
    module.cpu()
    assert module[0].device.type == "cpu"
    train([module[0]], optimizer, range(5, 7))


@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
def test_other_dtypes_are_refused(change, device_type):
    module = torch.nn.Sequential(make_embedding(device=device_type))
    with pytest.raises(TypeError, match="has rows of float32"):
        getattr(module, change)()


def test_shared_memory_and_meta_are_refused():
    with pytest.raises(ValueError, match="can't be on device"):
        make_embedding().share_memory()
    with pytest.raises(ValueError, match="can't be on device meta"):
        make_embedding().to("meta")


@needs_gpu
def test_an_embedding_on_a_cpu_moves_after_it_was_to_be_shared():
    embedding = make_embedding()
    with pytest.raises(ValueError, match="shared memory"):
        embedding.share_memory()
    assert embedding.to("cuda").device.type == "cuda"


def test_what_was_to_be_shared_is_not_shared():
    embedding = make_embedding()
    with pytest.raises(ValueError, match="shared memory"):
        embedding.share_memory()
    assert not embedding.anchor.is_shared()
    assert embedding.cpu().float().device.type == "cpu"
