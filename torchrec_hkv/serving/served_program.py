"""The forward of a model that serves: an exported program as a function of flat tensors.

``ExportedProgram.module()`` matches the structure of its arguments in each call, which takes longer
than the lookups of a small request. This module calls the program's graph with flat tensors, after
checking their dtypes and shapes, and calls lookups without the dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from torchrec_hkv import _C

_aten, _ops = torch.ops.aten, torch.ops.torchrec_hkv
#: Larger than any size of a tensor.
_LARGEST = 1 << 60


class ServedProgram:
    """A program that serves. It is immutable; several threads may call it.

    Args:
        exported: the program, on the device that runs it.
        names: names in messages of the input tensors after the handle of the tables.
    """

    def __init__(self, exported: torch.export.ExportedProgram, names: Sequence[str]) -> None:
        module = exported.module()
        graph = module.graph
        placeholders = graph.find_nodes(op="placeholder")
        metas = [node.meta["val"] for node in placeholders]
        self._checks = _C.InputChecks(
            [
                (name, meta.dtype, [_dim(size) for size in meta.shape])
                for name, meta in zip(names, metas[1:], strict=True)
            ]
        )
        if not _has_other_conditions(exported, metas):
            _drop_guards(graph)
        _drop_conditions_of_sizes(graph)
        _drop_views(graph)
        _call_directly(graph)
        attributes = _as_inputs(module, graph, placeholders[0])
        self._out_spec = exported.call_spec.out_spec
        self._is_leaf = self._out_spec == pytree.treespec_leaf()
        graph.set_codegen(fx.graph.CodeGen())
        graph.eliminate_dead_code()
        self._forward = fx.GraphModule(module, graph).forward
        state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        self._set_state(state, attributes)

    def _set_state(self, state: dict[str, Tensor], attributes: dict[str, Tensor]) -> None:
        self._state, self._attributes = state, attributes
        self._tensors = [state.get(name, tensor) for name, tensor in attributes.items()]

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers by name."""
        return self._state

    def with_state(self, state: Mapping[str, Tensor]) -> ServedProgram:
        """The same program with other parameters and buffers.

        Args:
            state: tensors by the names of :attr:`state`, of the same shapes.
        """
        program = object.__new__(ServedProgram)
        program.__dict__.update(self.__dict__)
        moved = {
            name: state[name].to(tensor.device, tensor.dtype, copy=True)
            for name, tensor in self._state.items()
        }
        program._set_state(moved, self._attributes)
        return program

    def __call__(self, handle: Tensor, tensors: list[Tensor]) -> Any:
        """Runs the program.

        Args:
            handle: handle of the tables.
            tensors: the inputs.

        Raises:
            TypeError: an input has the wrong dtype.
            ValueError: an input has the wrong shape.
        """
        self._checks.check(tensors)
        try:
            out = self._forward(*self._tensors, handle, *tensors)
        except AssertionError as error:  # a condition of the program's graph
            raise ValueError(f"the model can't run on these inputs: {error}") from None
        return out[0] if self._is_leaf else pytree.tree_unflatten(out, self._out_spec)


def _dim(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else str(size.node.expr)


def _has_other_conditions(exported: torch.export.ExportedProgram, metas: Sequence[Any]) -> bool:
    """Whether the inputs of a program must fulfil conditions that a call does not check itself."""
    if getattr(exported, "_guards_code", None):
        return True
    sizes = [size for meta in metas for size in meta.shape if not isinstance(size, int)]
    if any(not size.node.expr.is_symbol for size in sizes):
        return True  # for example, a multiple of another size
    bounds = [exported.range_constraints.get(size.node.expr) for size in sizes]
    return any(bound and (bound.lower > 2 or bound.upper < _LARGEST) for bound in bounds)


def _drop_guards(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_module", target="_guards_fn"):
        graph.erase_node(node)


def _drop_conditions_of_sizes(graph: fx.Graph) -> None:
    """Removes assertions that the size of a tensor is not negative."""
    for node in graph.find_nodes(op="call_function", target=_aten._assert_scalar.default):
        condition = node.args[0]
        if (
            isinstance(condition, fx.Node)
            and getattr(condition.target, "__name__", "") == "ge"
            and condition.args[1] == 0
            and isinstance(condition.args[0], fx.Node)
            and condition.args[0].target is _aten.sym_size.int
        ):
            graph.erase_node(node)


def _drop_views(graph: fx.Graph) -> None:
    """Removes pairs of views that restore the original shape."""
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        inner = node.args[0]
        if inner.target is not _aten.view.default:
            continue
        viewed = inner.args[0]
        if _shape(viewed) is not None and _shape(viewed) == _shape(node):
            node.replace_all_uses_with(viewed)


def _call_directly(graph: fx.Graph) -> None:
    """Replaces lookups by functions that do the same, but are not called through the dispatcher."""
    for op, function in (
        (_ops.serving_pool.default, _C.serving_pool),
        (_ops.serving_rows.default, _C.serving_rows),
    ):
        for node in graph.find_nodes(op="call_function", target=op):
            node.args = torch.fx.operator_schemas.normalize_function(
                op, node.args, node.kwargs, normalize_to_only_use_kwargs=False
            ).args
            node.kwargs, node.target = {}, function


def _shape(node: fx.Node) -> tuple[int | str, ...] | None:
    value = node.meta.get("val")
    return tuple(map(_dim, value.shape)) if isinstance(value, Tensor) else None


def _as_inputs(module: fx.GraphModule, graph: fx.Graph, first: fx.Node) -> dict[str, Tensor]:
    """Turns the tensors that a graph reads from its module into inputs before ``first``, because
    each attribute lookup takes a microsecond. Returns the tensors by name."""
    found: dict[str, Tensor] = {}
    inputs: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        value: Any = module
        for name in node.target.split("."):
            value = getattr(value, name)
        if not isinstance(value, Tensor):
            continue  # for example, a graph of torch.cond
        if node.target not in found:
            with graph.inserting_before(first):
                inputs[node.target] = graph.placeholder(f"state_{len(found)}")
            found[node.target] = value.detach()
        node.replace_all_uses_with(inputs[node.target])
        graph.erase_node(node)
    return found
