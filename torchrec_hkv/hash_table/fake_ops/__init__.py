"""Fake implementations of the operators ``torch.ops.torchrec_hkv.*`` of hash tables.

Schemas and kernels are in ``csrc/bindings``. The dispatcher only takes tensors and numbers, so ops
identify a group of tables by its handle. :class:`torchrec_hkv.hash_table.TableGroup` calls them.
"""

from torchrec_hkv.hash_table.fake_ops import entries, files, lookup, syncs

__all__ = ["entries", "files", "lookup", "syncs"]
