"""A training loop with evaluations, as HybridBackend's ``train_and_evaluate``."""

from torchrec_hkv import needs_torchrec  # noqa: F401
from torchrec_hkv.integrations.hybridbackend.train_and_evaluate import (
    Evaluation,
    train_and_evaluate,
)

__all__ = ["Evaluation", "train_and_evaluate"]
