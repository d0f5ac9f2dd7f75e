"""The tables of one group on one rank."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import nn

from torchrec_hkv.backends.protocol.counting import CountingLookup
from torchrec_hkv.backends.protocol.entries import EntriesLookup
from torchrec_hkv.backends.protocol.files import FilesLookup
from torchrec_hkv.backends.protocol.replication import ReplicatedLookup
from torchrec_hkv.backends.protocol.state_dict import StateDictLookup
from torchrec_hkv.backends.protocol.training import TrainingLookup
from torchrec_hkv.backends.ragged import ragged_lookup


class GroupLookup(
    nn.Module,
    TrainingLookup,
    StateDictLookup,
    EntriesLookup,
    FilesLookup,
    ReplicatedLookup,
    CountingLookup,
    abc.ABC,
):
    """The tables of one group on one rank: one lookup for all of them, trained in its backward."""

    @property
    def is_training_lookup(self) -> bool:
        """Whether a lookup made now is a training lookup: in training mode, with autograd enabled.

        All other lookups are evaluation lookups: those in ``eval()`` mode, and those under
        ``torch.no_grad()`` or ``torch.inference_mode()``.
        """
        return self.training and torch.is_grad_enabled()

    @abc.abstractmethod
    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        batch_size: int,
        learning_rate: torch.Tensor,
    ) -> torch.Tensor:
        """Pools the rows of each bag.

        A training lookup (:attr:`is_training_lookup`) inserts missing ids. An evaluation lookup
        changes nothing in the table. The backward applies the optimizer at ``learning_rate`` and
        returns a gradient for ``weights`` only.

        Args:
            ids: int64 ``[n]``, feature-major: all bags of the first feature, then of the second.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``.
            weights: float32 ``[n]`` or None.
            batch_size: number of bags of each feature.
            learning_rate: float32 ``[]`` on the tables' device. The backward reads its value when
                it runs, so the value may change between replays of a CUDA graph.

        Returns:
            ``[batch_size, sum of the dims of the features' tables]``, of the dtype given to
            :meth:`set_output_dtype`, float32 by default. It requires grad in a training lookup.

        Raises:
            ValueError: ``ids`` has another dtype, or ``offsets`` or ``weights`` another length.
        """

    def forward_ragged(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        bags: Sequence[int],
        dims: Sequence[int],
        learning_rate: torch.Tensor,
    ) -> torch.Tensor:
        """Pools the rows of each bag, like :meth:`forward`, but each feature has its own number of
        bags.

        Used for batches of variable size, and for sequences, where each id is a bag. The default
        calls :meth:`forward`; a backend with a kernel for ragged bags overrides it.

        Args:
            ids: int64 ``[n]``, feature-major.
            offsets: int64 ``[sum of bags + 1]`` into ``ids``, feature-major.
            weights: float32 ``[n]`` or None.
            bags: number of bags of each feature.
            dims: number of columns of each feature.
            learning_rate: float32 ``[]``, see :meth:`forward`.

        Returns:
            ``[sum of bags * dims]``: one feature after the other, each as ``[bags, dim]``.
        """

        def lookup(uniform_offsets: torch.Tensor, batch_size: int) -> torch.Tensor:
            return self(ids, uniform_offsets, weights, batch_size, learning_rate)

        return ragged_lookup(lookup, offsets, bags, dims)

    def set_output_dtype(self, dtype: torch.dtype) -> None:
        """Sets the dtype of the outputs of later lookups, one of :attr:`Backend.output_dtypes`.

        A backend that only returns float32 need not override this.
        """
