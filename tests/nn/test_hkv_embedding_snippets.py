"""Snippets of HKV Embedding's documents run if its name is replaced by this package's."""

import warnings

import pytest
import torch
from torch import nn

import torchrec_hkv

QUICK_START = """
import torch
import hkv_embedding

# Create embedding layer for billion-scale IDs
embedding = hkv_embedding.HierarchicalHashEmbedding(
    embedding_dim=64,
    max_capacity=1_000_000_000,  # 1 billion IDs
    init_capacity=1_000_000,
    max_hbm_gb=16,  # 16GB GPU memory for embeddings
    grad_buffer_hbm_gb=2  # 2GB for gradient accumulation
)

# Create optimizer (GPU-backed Adam states)
optimizer = hkv_embedding.HKVAdamOptimizer(
    [embedding],
    lr=0.001,
    state_hbm_gb_per_embedding=4  # 4GB for Adam m/v states
)

# Use like any PyTorch embedding
indices = torch.randint(0, 1_000_000_000, (1024,), device='cuda')
embeddings = embedding(indices)

# Backward pass accumulates gradients to GPU buffer
loss = embeddings.mean()
loss.backward()

# Update embeddings
optimizer.step()
optimizer.zero_grad()
"""

COMPONENTS = """
embedding = hkv_embedding.HierarchicalHashEmbedding(
    embedding_dim=64,           # Embedding vector dimension
    max_capacity=1_000_000_000, # Maximum unique IDs
    init_capacity=1_000_000,    # Initial allocation
    max_hbm_gb=16,              # GPU memory for embeddings
    learning_rate=0.01,         # For built-in SGD
    weight_decay=0.0,           # L2 regularization
    grad_buffer_hbm_gb=1        # GPU memory for gradients
)
multi_embedding = hkv_embedding.MultiTableHKVEmbedding(
    num_tables=10,              # 10 feature fields
    embedding_dim=32,
    max_capacity_per_table=100_000_000,
    max_hbm_gb_per_table=2
)
"""

OPTIMIZERS = [
    "hkv_embedding.HKVOptimizer(embeddings, lr=0.01)",
    """hkv_embedding.HKVAdamOptimizer(
    embeddings,
    lr=0.001,
    betas=(0.9, 0.999),
    state_hbm_gb_per_embedding=2  # GPU memory for m/v states
)""",
    """hkv_embedding.HKVAdagrad(
    embeddings,
    lr=0.1,
    state_hbm_gb_per_embedding=1
)""",
    """hkv_embedding.HKVSparseAdam(
    embeddings,
    lr=0.001,
    state_hbm_gb_per_embedding=2
)""",
]

DEEP_FM = """
class DeepFMModel(nn.Module):
    def __init__(self, num_fields, embedding_dim):
        super().__init__()
        self.embeddings = hkv_embedding.MultiTableHKVEmbedding(
            num_tables=num_fields,
            embedding_dim=embedding_dim,
            max_capacity_per_table=100_000_000
        )
        self.mlp = nn.Sequential(...)

    def forward(self, sparse_features):
        emb_list = self.embeddings(sparse_features)
        # FM + Deep components
        ...
"""
FM_AND_DEEP = """
        stacked = torch.stack(emb_list, 1)
        fm = (stacked.sum(1) ** 2 - (stacked**2).sum(1)).sum(1, keepdim=True) / 2
        return fm + self.mlp(torch.cat(emb_list, 1))
"""

TWO_TOWER = """
class TwoTowerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_emb = hkv_embedding.HierarchicalHashEmbedding(
            embedding_dim=64,
            max_capacity=1_000_000_000  # 1B users
        )
        self.item_emb = hkv_embedding.HierarchicalHashEmbedding(
            embedding_dim=64,
            max_capacity=100_000_000   # 100M items
        )
        self.user_tower = nn.Sequential(...)
        self.item_tower = nn.Sequential(...)
"""


@pytest.fixture
def run(device_type):
    """``run(code, **names)``: returns the code's names; ids are on the test's device."""
    if device_type == "cpu" and torch.cuda.is_available():
        pytest.skip("the snippets take the GPU where there is one")

    def run_snippet(code, **names):
        code = code.replace("import hkv_embedding", "import torchrec_hkv")
        code = code.replace("hkv_embedding", "torchrec_hkv").replace("'cuda'", f"'{device_type}'")
        names |= {"torch": torch, "nn": nn, "torchrec_hkv": torchrec_hkv}
        with warnings.catch_warnings():
            # Memory may be too small for so many rows; see tests/nn/test_memory.py.
            warnings.filterwarnings("ignore", message="max_capacity is")
            exec(code, names)
        return names

    return run_snippet


def test_quick_start_trains_its_rows(run):
    names = run(QUICK_START)
    embedding, indices = names["embedding"], names["indices"]
    assert embedding.counters()["embedding"]["size"] == len(indices.unique())
    embedding.eval()
    moved = (embedding(indices) - names["embeddings"]).detach()
    # Adam's first step has the length of the learning rate and the opposite sign of the gradient.
    torch.testing.assert_close(moved, torch.full_like(moved, -0.001), rtol=0, atol=1e-5)


def test_components_are_made_as_they_are_described(run):
    names = run(COMPONENTS)
    assert names["embedding"].embedding_dim == 64
    ids = torch.arange(5, device=names["embedding"].device)
    assert [rows.shape for rows in names["multi_embedding"]([ids] * 10)] == [(5, 32)] * 10


@pytest.mark.parametrize("code", OPTIMIZERS)
def test_optimizers_are_made_as_they_are_described(run, code):
    embedding = run(COMPONENTS)["embedding"]
    optimizer = run(f"optimizer = {code}", embeddings=embedding)["optimizer"]
    ids = torch.arange(5, device=embedding.device)
    before = embedding(ids)
    before.sum().backward()
    optimizer.step()
    assert (embedding(ids) < before).all()


def test_deep_fm_trains(run):
    body = DEEP_FM.replace("nn.Sequential(...)", "nn.Sequential(nn.LazyLinear(1))")
    names = run(body.rstrip().removesuffix("...").rstrip(" ") + FM_AND_DEEP.lstrip("\n"))
    make = "model = DeepFMModel(4, 8)"
    model = run(make, DeepFMModel=names["DeepFMModel"])["model"]
    device = model.embeddings.device
    model.mlp.to(device)
    optimizer = torchrec_hkv.HKVAdagrad(model.embeddings, lr=0.1)
    torch.manual_seed(0)
    fields = [torch.randint(-(2**62), 2**62, (32,), device=device) for _ in range(4)]
    labels = torch.randint(2, (32, 1), device=device).float()
    losses = []
    for _ in range(30):
        loss = nn.functional.binary_cross_entropy_with_logits(model(fields), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_two_towers_train(run):
    body = TWO_TOWER.replace("nn.Sequential(...)", "nn.Sequential(nn.Linear(64, 16))")
    torch.manual_seed(0)
    names = run(body + "\nmodel = TwoTowerModel()")
    model = names["model"]
    device = model.user_emb.device
    model.to(device)
    optimizer = torchrec_hkv.HKVAdamOptimizer([model.user_emb, model.item_emb], lr=0.01)
    users, items = torch.arange(20, device=device), torch.arange(100, 120, device=device)
    losses = []
    for _ in range(60):
        user = model.user_tower(model.user_emb(users))
        item = model.item_tower(model.item_emb(items))
        loss = nn.functional.cross_entropy(user @ item.T, torch.arange(20, device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
