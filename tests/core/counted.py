"""Counts the work of a call in operations, which no other load can change.

An operation is a statement, a call, or one item that a loop goes over, whether the loop
is written in Python or hidden in C: in `sorted`, `sum`, `list`, `heapify`, an unpacking
or a slice. For that the code of every function is replaced, while it is counted, by the
same with a call of `Counter` around each expression that may loop. What libraries do
counts as one operation where their documentation says O(log n) or better.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from sortedcontainers import SortedKeyList, SortedList

import vllm_ctx_offload.core

_NAME = "__counter__"
# Return at once, and go over their arguments when they are asked for items.
_LAZY = {"chain", "enumerate", "filter", "groupby", "iter", "map", "merge", "next"}
_LAZY |= {"reversed", "zip"}
# Do O(log n) or less with the containers that they are given.
_QUICK = {"add", "append", "appendleft", "bisect_left", "bisect_right", "discard"}
_QUICK |= {"get", "heappop", "heappush", "heapreplace", "insort", "irange_key", "len"}
_QUICK |= {"isinstance", "pop", "setdefault", "_push", "range"}
# Go over the container whose methods they are.
_WHOLE = {"clear", "copy", "count", "index", "insert", "reverse", "sort"}
_SIZED = (list, tuple, dict, set, frozenset, deque, SortedList, SortedKeyList)
_SIZED += (type({}.keys()), type({}.values()), type({}.items()))
# In these a thing is found without going over the others.
_INDEXED = (dict, set, frozenset, SortedList, SortedKeyList, type({}.keys()))


class Counter:
    """What the replaced code calls; each method passes on what it is given."""

    def __init__(self) -> None:
        self.operations = 0

    def step(self) -> None:
        """A statement begins."""
        self.operations += 1

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """A loop goes over `items`, perhaps not to their end."""
        for item in items:
            self.operations += 1
            yield item

    def whole(self, items: Any) -> Any:
        """All of `items` is gone over, if it is what can be."""
        if isinstance(items, _SIZED):
            self.operations += len(items)
        elif isinstance(items, Iterator):
            return self.each(items)
        return items

    def searched(self, items: Any) -> Any:
        """`items` is what something is looked for in."""
        return items if isinstance(items, _INDEXED) else self.whole(items)

    def call(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """`func` is called."""
        self.operations += 1 + len(args)
        name = getattr(func, "__name__", "")
        if name == "islice":
            self.operations += args[1] if len(args) > 2 else 0
        elif not (_is_counted(func) or name in _LAZY or name in _QUICK):
            if name in _WHOLE or (name == "pop" and args == (0,)):
                self.whole(getattr(func, "__self__", None))
            args = tuple([self.whole(arg) for arg in args])
        return func(*args, **kwargs)


def _is_counted(func: Any) -> bool:
    """Whether it is Python of ours, whose own operations are counted."""
    func = func.__func__ if isinstance(func, MethodType) else func
    return isinstance(func, FunctionType) and _NAME in func.__globals__


class _Rewriter(ast.NodeTransformer):
    """Puts a method of `Counter` around all that may loop."""

    def visit(self, node: ast.AST) -> ast.AST:
        node = super().visit(node)
        if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.While | ast.Try):
            for field in ("body", "orelse", "finalbody"):
                if statements := getattr(node, field, None):
                    setattr(node, field, self._with_steps(statements))
        return node

    def _with_steps(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        steps = []
        for statement in statements:
            step = ast.Expr(_wrapped("step", at=statement))
            steps += [ast.copy_location(step, statement), statement]
        return steps

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return _wrapped("call", node.func, *node.args, keywords=node.keywords, at=node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = _wrapped("each", node.iter, at=node)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.iter = _wrapped("each", node.iter, at=node.iter)
        return node

    def visit_YieldFrom(self, node: ast.YieldFrom) -> ast.AST:
        self.generic_visit(node)
        node.value = _wrapped("each", node.value, at=node)
        return node

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = _wrapped("whole", node.value, at=node)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        pairs = zip(node.keys, node.values, strict=True)
        node.values = [v if k else _wrapped("whole", v, at=v) for k, v in pairs]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        node.left = _wrapped("whole", node.left, at=node)
        node.right = _wrapped("whole", node.right, at=node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        node.value = _wrapped("whole", node.value, at=node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load):
            return _wrapped("whole", node, at=node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for index, (op, items) in enumerate(
            zip(node.ops, node.comparators, strict=True)
        ):
            if isinstance(op, ast.In | ast.NotIn):
                node.comparators[index] = _wrapped("searched", items, at=node)
            elif isinstance(op, ast.Eq | ast.NotEq):
                node.comparators[index] = _wrapped("whole", items, at=node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        return node  # defaults and annotations: they are not run with the function


def _wrapped(
    method: str, *args: ast.expr, at: ast.AST, keywords: Collection[ast.keyword] = ()
) -> ast.expr:
    func = ast.Attribute(ast.Name(_NAME, ast.Load()), method, ast.Load())
    call = ast.Call(func, list(args), list(keywords))
    return ast.fix_missing_locations(ast.copy_location(call, at))


class Counted:
    """Counts what calls do in the functions of some modules, by default the core."""

    def __init__(self, modules: Iterable[ModuleType] | None = None) -> None:
        self._counter = Counter()
        self._codes: list[tuple[FunctionType, CodeType, CodeType]] = []
        for module in modules or _core_modules():
            module.__dict__[_NAME] = self._counter
            tree = _Rewriter().visit(ast.parse(inspect.getsource(module)))
            code = compile(tree, f"<counted {module.__name__}>", "exec")
            codes = dict(_codes_in(code))
            for function in _functions_of(module):
                before = function.__code__
                after = codes[before.co_qualname, before.co_firstlineno]
                self._codes.append((function, before, after))

    def count(self, call: Callable[[], object]) -> int:
        """Returns how many operations `call` takes."""
        for function, _, counted in self._codes:
            function.__code__ = counted
        before = self._counter.operations
        try:
            call()
        finally:
            for function, original, _ in self._codes:
                function.__code__ = original
        return self._counter.operations - before


def _core_modules() -> list[ModuleType]:
    core = vllm_ctx_offload.core
    names = [info.name for info in pkgutil.iter_modules(core.__path__)]
    return [importlib.import_module(f"{core.__name__}.{name}") for name in names]


def _codes_in(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from _codes_in(constant)


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Returns the functions that are written in a module, methods among them."""
    holders = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
    for value in [value for holder in holders for value in vars(holder).values()]:
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if isinstance(function, FunctionType) and (
            Path(function.__code__.co_filename) == Path(inspect.getfile(module))
        ):
            yield function


_CORE = Counted()


def count_operations(call: Callable[[], object]) -> int:
    """Returns how many operations of the core `call` takes."""
    return _CORE.count(call)
