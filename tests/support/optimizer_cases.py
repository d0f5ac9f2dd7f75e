"""One optimizer of each kind, for tests of their common properties."""

from __future__ import annotations

from torchrec_hkv.hash_table import (
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

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(weight_decay=0.1),
    "momentum": SGD(0.9, nesterov=True),
    "adagrad": Adagrad(),
    "rowwise_adagrad": RowWiseAdagrad(weight_decay=0.1),
    "adam": Adam(),
    "adam_by_row": Adam(step_mode="row"),
    "adamw": AdamW(),
    "rowwise_adam": RowWiseAdam(),
    "rowwise_adam_by_row": RowWiseAdam(step_mode="row"),
    "lamb": LAMB(weight_decay=0.1),
    "lamb_by_row": LAMB(step_mode="row"),
    "ftrl": FTRL(0.5, 0.01, 0.01),
}
