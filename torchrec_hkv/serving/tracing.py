"""A trained model as one program: its collections replaced by lookups in read-only tables, and its
``KeyedJaggedTensor`` arguments by tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_hkv.hash_table.id_types import int64_ids
from torchrec_hkv.serving.keyed_ids import check_one_stride
from torchrec_hkv.serving.manifest import InputRecord
from torchrec_hkv.sharding.state.names import joined

_ops = torch.ops.torchrec_hkv
#: Namespaces of the ops that a program may call. PyTorch or this package provides them without
#: TorchRec.
_NAMESPACES = frozenset({"aten", "prims", "torchrec_hkv", "_operator", "higher_order"})


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a collection.

    Attributes:
        name: key of the output.
        feature: the feature whose ids are looked up.
        table: full name of the table.
        dim: number of columns.
        kind: kind of pooling, an argument of ``serving_pool``.
    """

    name: str
    feature: str
    table: str
    dim: int
    kind: int


@dataclasses.dataclass(frozen=True)
class LookupCall:
    """The outputs of a collection that one op call looks up.

    Attributes:
        outputs: numbers of the outputs in the collection.
        tables: the number of the table of each output; empty for Tensor-Train tables.
        group: number of the group of Tensor-Train tables, or None for tables of rows.
        is_mean: whether the group pools by mean.
    """

    outputs: Sequence[int]
    tables: Sequence[int] = ()
    group: int | None = None
    is_mean: bool = False


@dataclasses.dataclass
class CurrentHandle:
    """Holds the handle of the tables during a call or a trace."""

    handle: Tensor | None = None


class _Lookup(nn.Module):
    def __init__(
        self,
        outputs: Sequence[Output],
        calls: Sequence[LookupCall],
        is_weighted: bool,
        current: CurrentHandle,
    ) -> None:
        super().__init__()
        self.outputs, self.calls = outputs, calls
        self.is_weighted, self.current = is_weighted, current

    def batch(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, lengths ``[features, samples]``, and weights."""
        check_one_stride(features)
        lengths = features.lengths().view(len(features.keys()), features.stride())
        return features.values(), lengths, features.weights() if self.is_weighted else None

    def numbers(self, features: KeyedJaggedTensor, call: LookupCall) -> list[int]:
        keys = features.keys()
        return [keys.index(self.outputs[number].feature) for number in call.outputs]


class PooledLookup(_Lookup):
    """Replaces an ``EmbeddingBagCollection``."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The pooled rows of a batch."""
        ids, lengths, weights = self.batch(features)
        pieces: list[Tensor | None] = [None] * len(self.outputs)
        pooled = None
        for part in self.calls:
            outputs = [self.outputs[number] for number in part.outputs]
            dims = [output.dim for output in outputs]
            call = (self.current.handle, ids, lengths, weights, self.numbers(features, part))
            if part.group is None:
                kinds = [output.kind for output in outputs]
                pooled = _ops.serving_pool(*call, part.tables, kinds, sum(dims), torch.float32)
            else:
                pooled = _ops.serving_tt(*call, part.group, dims, part.is_mean, True)[0]
            for number, piece in zip(part.outputs, pooled.split(dims, dim=1), strict=True):
                pieces[number] = piece
        values = pooled if len(self.calls) == 1 else torch.cat(pieces, dim=1)
        return KeyedTensor(
            keys=[output.name for output in self.outputs],
            length_per_key=[output.dim for output in self.outputs],
            values=values,
            key_dim=1,
        )


class SequenceLookup(_Lookup):
    """Replaces an ``EmbeddingCollection``. With ``gives_ids`` outputs have the ids as weights
    (``need_indices``)."""

    def __init__(
        self,
        outputs: Sequence[Output],
        calls: Sequence[LookupCall],
        gives_ids: bool,
        current: CurrentHandle,
    ) -> None:
        super().__init__(outputs, calls, False, current)
        self.gives_ids = gives_ids

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The row of each id of a batch."""
        ids, lengths, _ = self.batch(features)
        starts = _offsets(lengths.sum(dim=1)) if self.gives_ids else None
        found: dict[str, JaggedTensor] = {}
        for part in self.calls:
            outputs = [self.outputs[number] for number in part.outputs]
            dims = [output.dim for output in outputs]
            numbers = self.numbers(features, part)
            call = (self.current.handle, ids, lengths)
            if part.group is None:
                rows = _ops.serving_rows(*call, numbers, part.tables, dims, torch.float32)
            else:
                rows = _ops.serving_tt(*call, None, numbers, part.group, dims, False, False)
            for output, number, values in zip(outputs, numbers, rows, strict=True):
                of_feature = lengths[number]
                its_ids = None
                if starts is not None:
                    at = starts[number] + torch.arange(values.shape[0], device=ids.device)
                    its_ids = ids.index_select(0, at)
                found[output.name] = JaggedTensor(
                    values=values,
                    weights=its_ids,
                    lengths=of_feature,
                    offsets=_offsets(of_feature),
                )
        return {output.name: found[output.name] for output in self.outputs}


def _offsets(lengths: Tensor) -> Tensor:
    return functional.pad(lengths.cumsum(0), (1, 0))


#: Returns a parameter or buffer in host memory. Arguments: its key in the ``state_dict``, the
#: module's tensor, and whether it is in the ``state_dict``.
Dense = Callable[[str, Tensor, bool], Tensor]


def with_lookups(model: nn.Module, lookups: dict[int, nn.Module], dense: Dense) -> nn.Module:
    """Copies a model to host memory, in evaluation mode, and replaces some of its modules.

    Args:
        model: the model, which does not change.
        lookups: replacements of modules, by the module's ``id``.
        dense: returns the tensors of all other modules.
    """
    replaced: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def on_host(name: str, tensor: Tensor | None, is_saved: bool) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:  # copied modules share tensors like the originals
            host = dense(name, tensor, is_saved)
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(host, requires_grad=False) if is_parameter else host
        return tensors[id(tensor)]

    def copied(path: str, module: nn.Module) -> nn.Module:
        if id(module) in lookups:
            return lookups[id(module)]
        if (inner := unwrapped(module)) is not module:
            return copied(path, inner)
        if id(module) not in replaced:
            copy = replaced[id(module)] = module.__class__.__new__(module.__class__)
            copy.__dict__.update(module.__dict__)
            unsaved = module._non_persistent_buffers_set
            parts = {
                attribute: {
                    name: on_host(joined(path, name), tensor, name not in unsaved)
                    for name, tensor in getattr(module, attribute).items()
                }
                for attribute in ("_parameters", "_buffers")
            }
            copy.__dict__.update(training=False, _modules={}, **parts)
            for name, child in module._modules.items():
                copy._modules[name] = None if child is None else copied(joined(path, name), child)
        return replaced[id(module)]

    return copied("", model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that ``DistributedModelParallel`` and DDP wrap."""
    while isinstance(model, (DistributedModelParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


class Program(nn.Module):
    """The exported program, ``forward(handle, *tensors)``. ``handle``, int64 ``[1]``, names the
    open tables. ``tensors`` are the leaves of the model's arguments in the order of PyTorch's
    pytree. Ids are ``values``, int64 ``[n]``, ``lengths``, int64 ``[features, samples]``, and, if
    they are weighted, ``weights``, float32 ``[n]``.

    Args:
        model: the model, with lookups in place of its collections.
        current: the handle that the lookups read.
        tree: structure of the model's arguments.
        inputs: descriptions of the leaves.
    """

    def __init__(
        self,
        model: nn.Module,
        current: CurrentHandle,
        tree: pytree.TreeSpec,
        inputs: Sequence[InputRecord],
    ) -> None:
        super().__init__()
        self.model = model
        self._current, self._tree, self._inputs = current, tree, inputs

    def forward(self, handle: Tensor, *tensors: Tensor) -> Any:
        """The model's outputs."""
        remaining = list(tensors)
        leaves: list[Any] = []
        for record in self._inputs:
            if record.kind == "constant":
                leaves.append(record.value)
            elif record.kind == "tensor":
                leaves.append(remaining.pop(0))
            else:
                values, lengths = remaining.pop(0), remaining.pop(0)
                weights = remaining.pop(0) if record.is_weighted else None
                of_bags = lengths.flatten()
                leaves.append(
                    KeyedJaggedTensor(
                        keys=list(record.keys),
                        values=values,
                        weights=weights,
                        lengths=of_bags,
                        offsets=_offsets(of_bags),
                        stride=lengths.shape[1],
                    )
                )
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        self._current.handle = handle
        try:
            return self.model(*args, **kwargs)
        finally:
            self._current.handle = None


def describe_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[pytree.TreeSpec, list[InputRecord], list[Tensor]]:
    """Returns the structure of the arguments, their leaves, and the tensors that :class:`Program`
    takes.

    Raises:
        TypeError: a leaf is not a tensor, a ``KeyedJaggedTensor``, a number, a string or None.
        ValueError: features have different numbers of samples.
    """
    leaves, tree = pytree.tree_flatten(
        (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedTensor)
    )
    records: list[InputRecord] = []
    tensors: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, KeyedJaggedTensor):
            check_one_stride(leaf)
            weights = leaf.weights_or_none()
            keys = list(leaf.keys())
            records.append(InputRecord("ids", keys, weights is not None, None))
            tensors += [int64_ids(leaf.values()), leaf.lengths().view(len(keys), -1).long()]
            tensors += [] if weights is None else [weights.float()]
        elif isinstance(leaf, Tensor):
            records.append(InputRecord("tensor", [], False, None))
            tensors.append(leaf)
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            records.append(InputRecord("constant", [], False, leaf))
        else:
            raise TypeError(
                f"inputs hold a {type(leaf).__name__}, but must hold tensors, KeyedJaggedTensors, "
                "numbers, strings and None in tuples, lists and dictionaries."
            )
    return tree, records, tensors


def trace(program: Program, tensors: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """Exports a program, for any number of samples and ids.

    Args:
        program: the program, in evaluation mode.
        tensors: example inputs, from :func:`describe_inputs`.

    Raises:
        ValueError: the program calls ops of TorchRec or another package.
    """
    dynamic: list[dict[int, Any]] = []
    for tensor, is_lengths in zip(tensors, _are_lengths(program), strict=True):
        axis = 1 if is_lengths else 0
        dynamic.append({axis: torch.export.Dim.AUTO} if tensor.dim() > axis else {})
    handle = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        exported = torch.export.export(
            program,
            (handle, *[tensor.detach() for tensor in tensors]),
            dynamic_shapes=({}, tuple(dynamic)),
            strict=False,
        )
    exported = exported.run_decompositions({})
    foreign = sorted(
        {
            str(node.target)
            for node in exported.graph.nodes
            if node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and node.target.namespace not in _NAMESPACES
        }
    )
    if foreign:
        raise ValueError(
            f"the model's forward calls {', '.join(foreign)}, which a process without TorchRec "
            "lacks: use PyTorch's own operations there."
        )
    return exported


def _are_lengths(program: Program) -> list[bool]:
    kinds: list[bool] = []
    for record in program._inputs:
        if record.kind == "tensor":
            kinds.append(False)
        elif record.kind == "ids":
            kinds += [False, True] + [False] * record.is_weighted
    return kinds
