"""Optimizers for the rows of the embeddings in :mod:`torchrec_hkv.nn`.

A step updates each row that has gradients once. Other rows and their states do not change. States
are stored in the table beside the rows and are evicted with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.hash_table import SGD, Adagrad, Adam, Optimizer
from torchrec_hkv.nn.arguments import check_rate
from torchrec_hkv.nn.table_module import TableModule

Embeddings = TableModule | Iterable[TableModule] | Iterable[dict[str, Any]]


class RowOptimizer(torch.optim.Optimizer):
    """Base of the optimizers for rows.

    A ``torch.optim.Optimizer`` over embeddings instead of parameters; ``param_groups`` hold the
    anchors of the embeddings. ``lr`` of a group may be a tensor and may change, for example by a
    scheduler. Other values of a group must not change.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, several modules, or dicts with the modules
            under the key ``params`` and values that override ``defaults``.
        defaults: default values of the groups by name.
        state_hbm_gb_per_embedding: limit of GPU memory for the states of each table in GiB; None
            to count states as rows.
    """

    #: Makes ``GradScaler`` pass its scale to ``step()``, which skips updates that are not finite
    #: without a synchronization.
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
            raise ValueError(
                "embeddings hold a module more than once: give the optimizer each embedding once."
            )
        for group in groups:  # check all modules before attaching any
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
        """The optimizer of the kernels."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by PyTorch in the constructor; later calls raise, because all embeddings must be
        given to the constructor."""
        if len(self.param_groups) == len(self._fixed) and self._fixed:
            raise ValueError(
                f"{type(self).__name__} takes its embeddings at construction only: create another "
                "optimizer for further embeddings."
            )
        lr = param_group.get("lr", self.defaults.get("lr"))
        check_rate("lr", lr, or_tensor=True)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows by the stored gradients, each row once, and drops the gradients.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The result of ``closure``, or None.

        Raises:
            RuntimeError: an embedding was given to another optimizer since.
            ValueError: a value of a group other than ``lr`` has changed.
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
        """The scale of the calling GradScaler; 1 if gradients are unscaled already; None without a
        scaler."""
        if not hasattr(self, "found_inf"):
            return None
        scale = self.grad_scale
        return torch.ones_like(anchor) if scale is None else scale.to(anchor.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the stored gradients, for any ``set_to_none``."""
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
                    f"{type(self).__name__}: one of its embeddings was given to another optimizer "
                    "since, or was copied or loaded without its states: use the newer optimizer."
                )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled, because it is bound to its "
            "embeddings: create one over the copied embeddings, and load this one's state_dict."
        )

    # -- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``param_groups`` as in PyTorch, and in ``state`` the ids of each embedding with their
        optimizer states.

        Returns:
            ``state[i]`` belongs to the ``i``-th embedding. For each table it has ``ids`` int64
            ``[n]``, ``states`` float32 ``[n, width]`` and ``step`` int64 ``[]``, on the CPU.
        """
        saved = super().state_dict()
        saved["state"] = {
            i: {str(table): state for table, state in enumerate(module.optimizer_states())}
            for i, module in enumerate(self._modules.values())
        }
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads states and learning rates. Load the ``state_dict`` of the embeddings before.

        Raises:
            ValueError: the ``state_dict`` is of another optimizer, or has states of ids that an
                embedding does not hold. Nothing has changed then.
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
            # Copied, because schedulers write into a tensor in place, which both optimizers share.
            group.update({k: copy.deepcopy(v) for k, v in saved.items() if k != "params"})


class HKVOptimizer(RowOptimizer):
    """Stochastic gradient descent of rows, like ``torch.optim.SGD`` without momentum. It has no
    states.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, or several.
        lr: learning rate. None: for each group, the ``learning_rate`` of its first embedding.
        weight_decay: L2 regularization: this factor of the row is added to its gradient. None: each
            embedding's ``weight_decay``.
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
    """Adam of rows with one step count for all rows of a table, as in ``torch.optim.SparseAdam``.

    The formula is that of ``torch.optim.Adam``. ``SparseAdam`` adds ``eps`` before the bias
    correction, which matters only if gradients are not much larger than ``eps``.

    The states of a row are the means of its gradients and of their squares, 8 bytes a column.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, or several.
        lr: learning rate.
        betas: decay rates of the means.
        eps: added to the square root of the mean of squares.
        weight_decay: L2 regularization: this factor of the row is added to its gradient. None: each
            embedding's ``weight_decay``.
        state_hbm_gb_per_embedding: limit of GPU memory for the states of each table in GiB. A row
            and its states are in the same memory, so with ``max_hbm_gb`` of the embedding, both
            together stay within the sum. None: states count as rows.
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
    """Adam with a step count per row, stored in its state, that corrects the bias.

    An id that appears late, or again after an eviction, is therefore corrected like the first ids.
    The arguments are those of :class:`HKVAdamOptimizer`.
    """

    _step_mode = "row"


class HKVAdagrad(RowOptimizer):
    """Adagrad of rows, like ``torch.optim.Adagrad``.

    The state of a row is the sum of squares of its gradients, 4 bytes a column.

    Args:
        embeddings: a module of :mod:`torchrec_hkv.nn`, or several.
        lr: learning rate.
        eps: added to the square root of the sum.
        initial_accumulator_value: initial value of the sums.
        weight_decay: L2 regularization: this factor of the row is added to its gradient. None: each
            embedding's ``weight_decay``.
        state_hbm_gb_per_embedding: see :class:`HKVAdamOptimizer`.
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
    """Parameter groups whose ``params`` are lists of modules.

    Raises:
        TypeError: ``embeddings`` holds something other than modules of tables.
        ValueError: ``embeddings`` is empty.
    """
    if isinstance(embeddings, TableModule):
        embeddings = [embeddings]
    if not isinstance(embeddings, Iterable) or isinstance(embeddings, (Tensor, torch.nn.Module)):
        _refuse(embeddings)
    given = list(embeddings)
    if not given:
        raise ValueError("embeddings is empty, but must hold a module to train.")
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
        f"a {type(given).__name__}: train it with an optimizer of torch.optim."
    )


def _values(defaults: dict[str, Any], group: dict[str, Any], module: TableModule) -> dict[str, Any]:
    """The values of a group for one embedding."""
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
