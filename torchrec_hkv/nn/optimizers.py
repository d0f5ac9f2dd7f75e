"""Optimizers of the rows of :mod:`torchrec_hkv.nn`'s embeddings.

Each trains the rows that have gradients, once a step; others, and their states, stay as they are.
States live in the table beside the rows, and go when their row is evicted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.hash_table import SGD, Adagrad, Adam, Optimizer
from torchrec_hkv.nn.table_module import TableModule, check_rate

Embeddings = TableModule | Iterable[TableModule] | Iterable[dict[str, Any]]


class RowOptimizer(torch.optim.Optimizer):
    """What the optimizers of rows have in common.

    A ``torch.optim.Optimizer`` over embeddings in place of parameters; ``param_groups`` hold their
    anchors. ``lr`` of a group may change, as schedulers do it, and be a tensor; other values are
    fixed.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, several, or dicts with the key ``params``
            for them and with other values of ``defaults``.
        defaults: by name.
        state_hbm_gb_per_embedding: GiB of a GPU's memory for the states of each table.
    """

    #: ``GradScaler`` hands over its scale, and step() skips what is not finite without a wait.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        embeddings: Embeddings,
        defaults: dict[str, Any],
        state_hbm_gb_per_embedding: float | None,
    ) -> None:
        groups = _groups(embeddings)
        modules = [module for group in groups for module in group["params"]]
        if len({id(module) for module in modules}) != len(modules):
            raise ValueError("An embedding was given to the optimizer more than once.")
        for group in groups:  # all are checked before any is attached
            for module in group["params"]:
                self._optimizer(_values(defaults, group, module))
        self._modules = {module.anchor: module for module in modules}
        self._fixed: list[dict[str, Any]] = []
        for group in groups:
            group["params"] = [module.anchor for module in group["params"]]
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for anchor in group["params"]:
                module = self._modules[anchor]
                optimizer = self._optimizer(_values(defaults, group, module))
                module.attach(self, optimizer, state_hbm_gb_per_embedding)
            self._fixed.append(_fixed(group))

    def _optimizer(self, values: dict[str, Any]) -> Optimizer:
        """What kernels take."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch calls it at construction; embeddings are all given there."""
        if len(self.param_groups) == len(self._fixed) and self._fixed:
            raise ValueError(
                f"{type(self).__name__} takes its embeddings at construction: make another "
                "optimizer for more."
            )
        lr = param_group.get("lr", self.defaults.get("lr"))
        check_rate("lr", lr, or_tensor=True)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows by the gradients held, once; nothing is held any more.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            RuntimeError: an embedding was given to another optimizer since.
            ValueError: a value of a group has changed that is fixed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, fixed in zip(self.param_groups, self._fixed, strict=True):
            self._check_group(group, fixed)
        for group in self.param_groups:
            for anchor in group["params"]:
                self._modules[anchor].apply_scaled_gradients(group["lr"], self._scale(anchor))
        return loss

    def _scale(self, anchor: Tensor) -> Tensor | None:
        """What a GradScaler that calls has scaled the loss by; 1 where it has undone that."""
        if not hasattr(self, "found_inf"):
            return None
        scale = self.grad_scale
        return torch.ones_like(anchor) if scale is None else scale.to(anchor.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients held, whatever ``set_to_none`` says."""
        for module in self._modules.values():
            module.zero_grad()

    def _check_group(self, group: dict[str, Any], fixed: dict[str, Any]) -> None:
        for name, value in fixed.items():
            if group[name] != value:
                raise ValueError(
                    f"{type(self).__name__}: {name} was {value!r} when it was made and is "
                    f"{group[name]!r} now, but only lr may change."
                )
        check_rate("lr", group["lr"], or_tensor=True)
        for anchor in group["params"]:
            if self._modules[anchor].owner is not self:
                raise RuntimeError(
                    f"{type(self).__name__}: an embedding of it was given to another optimizer "
                    "since, or its optimizer states are gone: use the newer one."
                )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled, since it belongs to embeddings: "
            "make one over the copied embedding, and load the state_dict of this one."
        )

    # -- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``param_groups`` as PyTorch's, and as ``state`` for each embedding ids with their states.

        Returns:
            ``state[i]`` is of the ``i``-th embedding, and for each table has ``ids`` int64 ``[n]``,
            ``states`` float32 ``[n, width]`` and ``step`` int64 ``[]``, in host memory.
        """
        saved = super().state_dict()
        saved["state"] = {
            i: {str(table): state for table, state in enumerate(module.optimizer_states())}
            for i, module in enumerate(self._modules.values())
        }
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over states and learning rates; the embeddings' own contents must be loaded before.

        Raises:
            ValueError: it is of another optimizer, or has states of ids that an embedding has not.
                Nothing has changed then.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != sizes or len(states) != sum(sizes):
            raise ValueError(
                f"The state_dict is of {[len(group['params']) for group in groups]} embeddings by "
                f"group, but this optimizer has {sizes}."
            )
        for saved, fixed in zip(groups, self._fixed, strict=True):
            check_rate("lr", saved.get("lr"), or_tensor=True)
            for name, value in fixed.items():
                if name not in saved or saved[name] != value:
                    raise ValueError(
                        f"The state_dict has {name}={saved.get(name)!r}, but this "
                        f"{type(self).__name__} has {value!r}."
                    )
        modules = list(self._modules.values())
        by_module = [
            [states[i][str(t)] for t in range(len(states[i]))] for i in range(len(modules))
        ]
        for module, state in zip(modules, by_module, strict=True):
            module.check_optimizer_states(state)
        for module, state in zip(modules, by_module, strict=True):
            module.load_optimizer_states(state)
        for saved, group in zip(groups, self.param_groups, strict=True):
            # Copied: a scheduler writes a tensor in place, and the other optimizer has it, too.
            group.update({k: copy.deepcopy(v) for k, v in saved.items() if k != "params"})


class HKVOptimizer(RowOptimizer):
    """Stochastic gradient descent of rows, as ``torch.optim.SGD``. It keeps no states.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, or several.
        lr: learning rate; None: each group's first embedding's ``learning_rate``.
        weight_decay: factor of the row, added to its gradient; None: each embedding's own.
    """

    def __init__(
        self, embeddings: Embeddings, lr: float | None = None, weight_decay: float | None = None
    ) -> None:
        groups = _groups(embeddings)
        for group in groups:
            if lr is None and group["params"]:
                group.setdefault("lr", group["params"][0].learning_rate)
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay}, None)

    def _optimizer(self, values: dict[str, Any]) -> Optimizer:
        return SGD(weight_decay=values["weight_decay"])


class HKVAdamOptimizer(RowOptimizer):
    """Adam of rows: one count of steps corrects all means, as in ``torch.optim.SparseAdam``.

    The formula is that of ``torch.optim.Adam``. ``SparseAdam`` adds ``eps`` before the correction,
    which tells only where gradients are not much larger than ``eps``.

    States of a row: means of its gradients and of their squares, 8 bytes a column.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, or several.
        lr: learning rate.
        betas: factors of the old means.
        eps: added to the root of the mean of squares.
        weight_decay: factor of the row, added to its gradient; None: each embedding's own.
        state_hbm_gb_per_embedding: GiB of a GPU's memory for the states of each table. A row and
            its states lie in the same memory, so where the embedding has a ``max_hbm_gb``, the two
            together are within the sum. None: states count as rows.
    """

    _step_mode = "global"

    def __init__(
        self,
        embeddings: Embeddings,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        state_hbm_gb_per_embedding: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(embeddings, defaults, state_hbm_gb_per_embedding)

    def _optimizer(self, values: dict[str, Any]) -> Optimizer:
        betas = values["betas"]
        return Adam(
            betas=tuple(betas) if isinstance(betas, list) else betas,
            eps=values["eps"],
            weight_decay=values["weight_decay"],
            step_mode=self._step_mode,
        )


class HKVSparseAdam(HKVAdamOptimizer):
    """Adam that counts the steps of each row: one more value of its state corrects its means.

    An id that comes late, or again after it was evicted, so starts as the first ones did. Arguments
    as for :class:`HKVAdamOptimizer`.
    """

    _step_mode = "row"


class HKVAdagrad(RowOptimizer):
    """Adagrad of rows, as ``torch.optim.Adagrad``.

    State of a row: the sums of squares of its gradients, 4 bytes a column.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, or several.
        lr: learning rate.
        eps: added to the root of the sum.
        initial_accumulator_value: what sums start from.
        weight_decay: factor of the row, added to its gradient; None: each embedding's own.
        state_hbm_gb_per_embedding: as for :class:`HKVAdamOptimizer`.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        lr: float = 1e-2,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        weight_decay: float | None = None,
        state_hbm_gb_per_embedding: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
            "weight_decay": weight_decay,
        }
        super().__init__(embeddings, defaults, state_hbm_gb_per_embedding)

    def _optimizer(self, values: dict[str, Any]) -> Optimizer:
        return Adagrad(
            eps=values["eps"],
            initial_accumulator=values["initial_accumulator_value"],
            weight_decay=values["weight_decay"],
        )


def _groups(embeddings: Embeddings) -> list[dict[str, Any]]:
    """Groups whose ``params`` are lists of modules.

    Raises:
        TypeError: something else than modules of tables.
    """
    if isinstance(embeddings, TableModule):
        embeddings = [embeddings]
    if not isinstance(embeddings, Iterable) or isinstance(embeddings, (Tensor, torch.nn.Module)):
        _refuse(embeddings)
    given = list(embeddings)
    if not given:
        raise ValueError("embeddings are an empty list: there is nothing to train.")
    groups = given if all(isinstance(each, dict) for each in given) else [{"params": given}]
    result = []
    for group in groups:
        members = group.get("params", [])
        members = [members] if isinstance(members, TableModule) else list(members)
        for module in members:
            if not isinstance(module, TableModule):
                _refuse(module)
        result.append({**group, "params": members})
    return result


def _refuse(given: object) -> None:
    raise TypeError(
        f"embeddings must be HierarchicalHashEmbedding or MultiTableHKVEmbedding modules, but hold "
        f"a {type(given).__name__}: train it by an optimizer of torch.optim."
    )


def _values(defaults: dict[str, Any], group: dict[str, Any], module: TableModule) -> dict[str, Any]:
    """The values of an embedding's optimizer."""
    values = {**defaults, **{k: v for k, v in group.items() if k != "params"}}
    if values["weight_decay"] is None:
        values["weight_decay"] = module.weight_decay
    unknown = sorted(set(values) - set(defaults) - {"initial_lr"})
    if unknown:
        raise ValueError(f"A group has {unknown}, but may have {['params', *defaults]}.")
    return values


def _fixed(group: dict[str, Any]) -> dict[str, Any]:
    """Values of a group that may not change."""
    return {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
