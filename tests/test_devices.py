"""Every module refuses a missing device in one sentence."""

import pytest
import torch

from tests.support.gpu import needs_gpu
from torchrec_hkv import (
    HashTable,
    HierarchicalHashEmbedding,
    MultiTableHKVEmbedding,
    TTEmbeddingBag,
)
from torchrec_hkv.devices import checked_device

MODULES = {
    "HashTable": lambda device: HashTable(4, 100, device=device),
    "HierarchicalHashEmbedding": lambda device: HierarchicalHashEmbedding(4, 100, device=device),
    "MultiTableHKVEmbedding": lambda device: MultiTableHKVEmbedding(2, 4, 100, device=device),
    "TTEmbeddingBag": lambda device: TTEmbeddingBag(100, 4, tt_ranks=2, device=device),
}


@pytest.mark.parametrize("module", MODULES)
def test_a_gpu_that_is_not_there(module):
    if torch.cuda.is_available():
        device, sentence = "cuda:99", r"device is 'cuda:99', but torch sees \d+ GPUs"
    else:
        device, sentence = "cuda", "device is 'cuda', but torch sees no GPU: use 'cpu'."
    with pytest.raises(ValueError, match=sentence):
        MODULES[module](device)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("device", [3, "gpu", "cuda:-1", 1.5])
def test_what_is_no_device(module, device):
    with pytest.raises(ValueError, match=r"device is .*, but must be a CPU or a CUDA device"):
        MODULES[module](device)


def test_a_cpu_with_an_index():
    ids = torch.tensor([5], device="cpu:0")
    table = HashTable(4, 100, device="cpu:0")
    assert table.find_or_insert(ids)[0].equal(table.find(ids)[0])
    assert checked_device("cpu:0") == torch.device("cpu")


def test_devices_that_are_there():
    assert checked_device("cpu") == torch.device("cpu")
    assert checked_device(torch.device("meta")).type == "meta"


@needs_gpu
def test_a_gpu_gets_its_index():
    assert checked_device("cuda") == torch.device("cuda", torch.cuda.current_device())
