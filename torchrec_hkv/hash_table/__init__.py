"""Hash tables for embedding rows: any 64-bit id, eviction, optimizer states beside the rows.

This package does not depend on TorchRec.
"""

from torchrec_hkv.hash_table import fake_ops as fake_ops
from torchrec_hkv.hash_table.admission import Admission, MinFrequency, Probability
from torchrec_hkv.hash_table.entries import Entries, Evicted, GroupEntries, GroupEvicted
from torchrec_hkv.hash_table.eviction import AgedLFU, EvictionPolicy
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.hash_table import HashTable
from torchrec_hkv.hash_table.initial_rows import initial_rows, table_seed
from torchrec_hkv.hash_table.initializers import (
    Constant,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
)
from torchrec_hkv.hash_table.optimizers import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
    RowWiseAdagrad,
    RowWiseAdam,
)
from torchrec_hkv.hash_table.routing import bucketize, owner_rank
from torchrec_hkv.hash_table.table_memory import (
    HbmShare,
    TableMemory,
    gpu_table_bytes,
    hbm_share_for,
    hbm_slots_for,
    table_memory,
)
from torchrec_hkv.hash_table.table_spec import TableSpec, TableState
from torchrec_hkv.hash_table.weight_scores import scores_of_weights

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Admission",
    "AgedLFU",
    "Constant",
    "Entries",
    "Evicted",
    "EvictionPolicy",
    "GroupEntries",
    "GroupEvicted",
    "HashTable",
    "HbmShare",
    "Initializer",
    "MinFrequency",
    "Normal",
    "Optimizer",
    "Probability",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "TableGroup",
    "TableMemory",
    "TableSpec",
    "TableState",
    "TruncatedNormal",
    "Uniform",
    "bucketize",
    "gpu_table_bytes",
    "hbm_share_for",
    "hbm_slots_for",
    "initial_rows",
    "owner_rank",
    "scores_of_weights",
    "table_memory",
    "table_seed",
]
