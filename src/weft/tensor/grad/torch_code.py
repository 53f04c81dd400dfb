"""Whether the code of an autograd.Function consists of torch's operations.

Such a Function needs no full tensors: its forward and backward run on ShardTensors, one operation
after the other, as other PyTorch code does. The source is read, never run. What is not known to
be an operation of torch, to give numbers, or to be such code itself, makes the Function opaque: a
call of an argument, numpy, an address, a kernel of the user's.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import textwrap
import weakref
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["is_torch_code"]

_KNOWN = weakref.WeakKeyDictionary[Any, bool]()

_ROOMS = (torch, torch.nn.functional, torch.fft, torch.linalg, torch.special)
"""Of whose public names calls are operations."""

_MODULES = (*_ROOMS, torch.nn, torch.autograd, torch.amp, torch.jit, math)

_NOT_OPERATIONS = frozenset((
    "as_tensor", "asarray", "compile", "frombuffer", "from_dlpack", "from_file", "from_numpy",
    "load", "save", "tensor", "to_dlpack", "vmap",
))
"""Of torch's public names: they compile, or read what is no tensor."""

_NOT_METHODS = frozenset((
    "apply_", "as_subclass", "backward", "cuda", "data_ptr", "dlpack_device", "grad", "grad_fn",
    "map2_", "map_", "module_load", "new", "new_tensor", "numpy", "pin_memory", "register_hook",
    "register_post_accumulate_grad_hook", "resize_", "resize_as_", "retain_grad", "set_",
    "share_memory_", "storage", "storage_type", "untyped_storage", "xpu",
))

_METHODS = frozenset(
    name for kind in (torch.Tensor, torch.Size, torch.dtype, torch.device, list, dict, str)
    for name in dir(kind) if not name.startswith("_")
) - _NOT_METHODS

_OF_CONTEXT = frozenset((
    "mark_dirty", "mark_non_differentiable", "save_for_backward", "set_materialize_grads",
))

_BUILTINS = frozenset((
    abs, all, any, bool, dict, enumerate, float, int, isinstance, len, list, max, min, range,
    reversed, round, set, slice, sorted, str, sum, tuple, zip,
))

_STATEMENTS = (
    ast.AsyncFor, ast.AsyncFunctionDef, ast.AsyncWith, ast.Await, ast.ClassDef, ast.FunctionDef,
    ast.Global, ast.Import, ast.ImportFrom, ast.Lambda, ast.Nonlocal, ast.Yield, ast.YieldFrom,
)
"""What no such code contains."""

_LOCAL: Any = object()
"""A value that only a run would show."""


class _Opaque(Exception):
    """Something is not known."""


def is_torch_code(cls: type[Function]) -> bool:
    """Whether forward and backward of a Function consist of torch's operations."""
    known = _KNOWN.get(cls)
    if known is None:
        known = _KNOWN[cls] = _is_torch_code(cls)
    return known


def _is_torch_code(cls: Any) -> bool:
    has_setup = cls.setup_context is not Function.setup_context
    parts = [(cls.forward, not has_setup), (cls.backward, True)]
    if has_setup:
        parts.append((cls.setup_context, True))
    try:
        for function, has_context in parts:
            _read(function, has_context, set())
    except _Opaque:
        return False
    return True


def _read(function: Any, has_context: bool, seen: set[Any]) -> None:
    """Raise _Opaque unless a function consists of torch's operations."""
    function = inspect.unwrap(getattr(function, "_torchdynamo_inline", function))  # scripted ones
    if function in seen:
        return
    seen.add(function)
    if not isinstance(function, FunctionType):
        raise _Opaque
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError):
        raise _Opaque from None
    if not isinstance(source, ast.FunctionDef):
        raise _Opaque
    _Reader(function, source, has_context, seen).read()


@cache
def _operations() -> frozenset[int]:
    """The ids of torch's public functions and classes."""
    return frozenset(
        id(value) for room in _ROOMS for name, value in vars(room).items()
        if callable(value) and not name.startswith("_") and name not in _NOT_OPERATIONS
    ) | {id(torch.autograd.grad), id(once_differentiable), id(torch.amp.custom_fwd),
         id(torch.amp.custom_bwd)}


class _Reader:
    """Reads the source of one function."""

    def __init__(
        self, function: FunctionType, source: ast.FunctionDef, has_context: bool, seen: set[Any]
    ) -> None:
        self.function, self.source, self.seen = function, source, seen
        self.outside = {**vars(builtins), **function.__globals__}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                self.outside[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                raise _Opaque from None
        names = [one.arg for one in ast.walk(source) if isinstance(one, ast.arg)]
        self.context = names[0] if has_context and names else None
        self.local = {*names, *[one.id for one in ast.walk(source) if isinstance(one, ast.Name)
                                and not isinstance(one.ctx, ast.Load)]}

    def read(self) -> None:
        for one in self.source.decorator_list:
            decorator = self.value(one.func if isinstance(one, ast.Call) else one)
            if not _is_in(decorator, (staticmethod, torch.jit.script)):
                self.check_call(decorator)
        for default in (*self.source.args.defaults, *self.source.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in self.source.body:
            self.visit(statement)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _STATEMENTS):
            raise _Opaque
        if isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            value = self.value(node)
            if value is not _LOCAL and not _is_constant(value):
                raise _Opaque
        elif isinstance(node, ast.AnnAssign):
            self.visit(node.target)
            if node.value is not None:
                self.visit(node.value)
        else:
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def call(self, node: ast.Call) -> None:
        for argument in (*node.args, *[one.value for one in node.keywords]):
            self.visit(argument)
        function = node.func
        if isinstance(function, ast.Attribute):
            base = self.value(function.value)
            if base is _LOCAL:
                is_context = isinstance(function.value, ast.Name) and (
                    function.value.id == self.context)
                if function.attr not in (_OF_CONTEXT if is_context else _METHODS):
                    raise _Opaque
                return
            if isinstance(base, type) and issubclass(base, Function) and function.attr == "apply":
                return  # which is asked itself
        self.check_call(self.value(function))

    def check_call(self, function: Any) -> None:
        """Raise _Opaque unless a call of this object is one of torch's, or gives numbers."""
        if function is _LOCAL:
            raise _Opaque
        if id(function) in _operations() or _is_in(function, _BUILTINS):
            return
        if getattr(math, getattr(function, "__name__", ""), None) is function:
            return
        if isinstance(function, type) and issubclass(function, Exception):
            return
        _read(function, False, self.seen)

    def value(self, node: ast.AST) -> Any:
        """What a name or an attribute stands for, or _LOCAL."""
        if isinstance(node, ast.Name):
            if node.id in self.local:
                return _LOCAL
            if node.id not in self.outside:
                raise _Opaque
            return self.outside[node.id]
        if not isinstance(node, ast.Attribute):
            self.visit(node)
            return _LOCAL
        base = self.value(node.value)
        if base is _LOCAL:
            is_context = isinstance(node.value, ast.Name) and node.value.id == self.context
            stores = isinstance(node.ctx, ast.Store)
            if not is_context and (stores or node.attr not in _METHODS):
                raise _Opaque
            return _LOCAL
        if isinstance(base, ModuleType) and not _is_in(base, _MODULES):
            raise _Opaque
        if not isinstance(base, (ModuleType, type)) or node.attr.startswith("_"):
            raise _Opaque
        try:
            return getattr(base, node.attr)
        except AttributeError:
            raise _Opaque from None


def _is_in(value: Any, known: Any) -> bool:
    return any(value is one for one in known)


def _is_constant(value: Any) -> bool:
    """Whether a value from outside cannot do anything: a number, a dtype, a class of torch's."""
    return value is None or isinstance(
        value, (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format)
    ) or (isinstance(value, type) and (
        id(value) in _operations() or _is_in(value, _BUILTINS) or issubclass(value, Exception))
    ) or (isinstance(value, tuple) and all(map(_is_constant, value)))
