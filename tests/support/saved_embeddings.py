"""Creates, trains and compares embeddings that tests save and copy."""

import io

import torch

from tests.support.embeddings import make_embedding, make_tables

IDS = [-(2**63), -1, 0, 1, 2, 3, 2**63 - 1]


def train(modules, optimizer, seeds):
    """Trains all modules with the same ids and gradients."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.tensor(IDS)[torch.randint(len(IDS), (5,), generator=generator)]
        grads = torch.randn(5, 4, generator=generator)
        for module in modules:
            rows = lookup(module, ids.to(module.device))
            (rows * grads.to(module.device)).sum().backward()
        optimizer.step()


def lookup(module, ids):
    """Looks up ids in a module with one table, or in the second of several tables."""
    return module([ids, ids + 1])[1] if hasattr(module, "num_tables") else module(ids)


def rows(module):
    """Returns the rows of all ids in host memory."""
    with torch.no_grad():
        return lookup(module, torch.tensor(IDS, device=module.device)).cpu()


def through_file(content, **kwargs):
    """Saves with ``torch.save`` and loads with ``torch.load``."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, **kwargs)


#: Modules that are saved and copied.
MAKERS = {
    "one table": make_embedding,
    "two tables": lambda **changes: make_tables(2, **changes),
    "lfu": lambda **changes: make_embedding(eviction="lfu", **changes),
}
