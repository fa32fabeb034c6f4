"""Questions about Python syntax that many modules ask: kinds of nodes, the name of a call and what it does, blocks.

Imports no torch: the parent process and the view into a hung process use this module too.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType, UnionType
from typing import Any

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
CALLABLES = FUNCTIONS | ast.Lambda
LOOPS = ast.For | ast.AsyncFor | ast.While
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
LEAVING = ast.Return | ast.Continue | ast.Break | ast.Raise  # statements behind which a block does not go on

Path = tuple[ast.AST, ...]  # the nodes around a node, outermost first
Block = list[ast.stmt]

# What well-known functions and methods do, by their names.

# A result that is a plain Python value.
_NUMBER_METHODS = frozenset({"item", "tolist"})
_NUMBER_FUNCTIONS = frozenset({"float", "int", "bool", "len", "str"})
# A tensor or array without a graph, and results that are no numbers to differentiate.
_DETACHING_METHODS = frozenset({"detach", "detach_", "numpy"})
_INTEGER_METHODS = frozenset(["argmax", "argmin", "argsort", "bool", "int", "long", "size", "format"])
_PLAIN_FUNCTIONS = frozenset({"print", "range"})

# Methods of a sequence, a set, a dict and a queue that add to it.
_GROWS = frozenset(
    ["append", "extend", "insert", "appendleft", "extendleft", "add", "update", "setdefault", "__setitem__"]
)
_ENQUEUES = frozenset(["put", "put_nowait", "push", "push_back", "enqueue"])
ADDING_METHODS = _GROWS | _ENQUEUES | {"add_param_group"}
# Methods of an object that keeps what it is given, to judge by the name alone.
STORING_METHODS = frozenset(
    "store record remember save log write register collect track cache send emit callback enter_context".split()
)
# Methods that take something out, or start anew. `seek` and `truncate` do that to a buffer.
TAKING_METHODS = frozenset(
    ["clear", "pop", "popleft", "popitem", "remove", "discard", "get_nowait", "pop_all", "seek", "truncate"]
)

# `loss.backward()`, `scaler.scale(loss).backward()`, `accelerator.backward(loss)`, Lightning's
# `self.manual_backward(loss)`, `torch.autograd.grad(loss, x)`, also imported as `grad`.
BACKWARD_CALLS = frozenset({"backward", "manual_backward", "grad"})


@functools.lru_cache(maxsize=64)
def _parsed(file: str, text: str) -> ast.Module | None:
    try:
        return ast.parse(text, file)
    except (SyntaxError, ValueError, RecursionError):
        return None


def syntax_tree(file: str, module_globals: dict[str, Any] | None = None) -> ast.Module | None:
    """The parsed source of a file, notebook cells included; None where there is no source."""
    text = "".join(linecache.getlines(file, module_globals))
    return _parsed(file, text) if text and not text.isspace() else None  # Python 3.13 has a newline for an empty file


def function_tree(code: CodeType, module_globals: dict[str, Any] | None = None) -> ast.Module | None:
    """The function alone that some code was compiled from, at its place in the file; None where that cannot be cut out.

    To parse a file of torch takes a hundred times as long.
    """
    if code.co_name.startswith("<"):
        return None
    lines = linecache.getlines(code.co_filename, module_globals)
    return _parsed_function("".join(lines[code.co_firstlineno - 1 : _last_line(code)]), code.co_firstlineno)


def _last_line(code: CodeType) -> int:
    """The last line of some code, functions that are defined in it included."""
    inner = [_last_line(each) for each in code.co_consts if isinstance(each, CodeType)]
    return max([code.co_firstlineno, *inner, *(end for _, end, _, _ in code.co_positions() if end is not None)])


@functools.lru_cache(maxsize=256)
def _parsed_function(text: str, line: int) -> ast.Module | None:
    is_method = text[:1].isspace()
    try:
        tree = ast.parse(f"class _:\n{text}" if is_method else text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if is_method and isinstance(tree.body[0], ast.ClassDef):
        tree.body = tree.body[0].body
    return ast.increment_lineno(tree, line - (2 if is_method else 1)) if tree.body else None


def nodes_in(tree: ast.AST | None) -> Iterator[ast.AST]:
    """A node and all nodes below it, as `ast.walk` gives them; nothing where there is no source."""
    if isinstance(tree, ast.Module):
        return iter(_nodes_of(tree))
    return ast.walk(tree) if tree is not None else iter(())


@functools.lru_cache(maxsize=64)
def _nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file, breadth first. A diagnosis reads the same files many times, some of torch among them."""
    found: list[ast.AST] = [tree]
    for node in found:  # grows meanwhile
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                found.extend([each for each in value if isinstance(each, ast.AST)])
            elif isinstance(value, ast.AST):
                found.append(value)
    return tuple(found)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a function, without those of functions and classes that are defined in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, CALLABLES | ast.ClassDef):
            yield from own_nodes(node)


def last_name(node: ast.AST) -> str:
    """The last identifier of a dotted name: `arange` of `torch.arange`; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def callee(call: ast.Call) -> str:
    """The name of the function or method that is called: `append` of `self.losses.append(x)`."""
    return last_name(call.func)


def calls_in(tree: ast.AST | None, *names: str) -> Iterator[ast.Call]:
    """The calls below a node; only those of functions and methods with these names, if names are given."""
    calls = (node for node in nodes_in(tree) if isinstance(node, ast.Call))
    return (call for call in calls if callee(call) in names) if names else calls


def first_line(function: ast.AST) -> int:
    """The first line of a function, decorators included, as in `co_firstlineno` of its code."""
    decorators = getattr(function, "decorator_list", [])
    return int(min([function.lineno, *(each.lineno for each in decorators)]))  # type: ignore[attr-defined]


def has_line(node: ast.stmt | ast.expr, line: int) -> bool:
    """Whether a statement or an expression covers a line."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def function_of(tree: ast.AST | None, code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function that some code was compiled from; None for a module, a lambda or a comprehension."""
    for node in nodes_in(tree):
        if isinstance(node, FUNCTIONS) and node.name == code.co_name and first_line(node) == code.co_firstlineno:
            return node
    return None


def innermost(tree: ast.AST | None, line: int, kinds: UnionType) -> ast.stmt | None:
    """The innermost statement of some kinds around a line."""
    statements = (node for node in nodes_in(tree) if isinstance(node, ast.stmt))
    around = (node for node in statements if isinstance(node, kinds) and has_line(node, line))
    return max(around, key=lambda node: node.lineno, default=None)


def function_around(path: Path) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """The innermost function in a path."""
    return next((node for node in reversed(path) if isinstance(node, CALLABLES)), None)


def function_name(code: CodeType) -> str:
    """The name of a function; `<module>` for a module and a notebook cell, which IPython 7 calls `<cell line: 1>`."""
    return "<module>" if code.co_name.startswith("<cell line") else code.co_name


def is_module(code: CodeType) -> bool:
    return function_name(code) == "<module>"


def body_of(tree: ast.Module, frame: FrameType) -> Block | None:
    if is_module(frame.f_code):
        return tree.body
    function = function_of(tree, frame.f_code)
    return function.body if function is not None else None


def innermost_block(body: Block, lines: set[int], *, header_counts: bool = False) -> Block:
    """The body of the innermost loop that holds all lines, else the whole body.

    A loop that fetches its next item is at its header; `header_counts` takes that for its body.
    """
    best = body
    candidates = list(body)
    while candidates:
        found: ast.stmt | None = None
        for statement in candidates:
            if spans(statement, lines):
                found = statement
                break
        if found is None or isinstance(found, CALLABLES | ast.ClassDef):
            return best
        candidates = []
        for block in blocks(found):
            if isinstance(found, LOOPS) and block is found.body:
                at_header = header_counts and all(found.lineno <= line < block[0].lineno for line in lines)
                if at_header or spans_block(block, lines):
                    best = block
            candidates.extend(block)
    return best


def loop_names(body: Block, block: Block) -> set[str]:
    """The names that the header of a loop gives new values to: they do not come from the iteration before."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.For | ast.AsyncFor) and node.body is block:
                return {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return set()


def blocks(statement: ast.AST) -> Iterator[Block]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(statement, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    for case in getattr(statement, "cases", []):
        yield case.body


def spans(statement: ast.stmt, lines: set[int]) -> bool:
    return all(has_line(statement, line) for line in lines)


def spans_block(block: Block, lines: set[int]) -> bool:
    return all(block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno) for line in lines)


def taken_at(function: ast.AST, line: int) -> list[tuple[ast.expr, int]]:
    """What `with` statements around a line have entered, and what `acquire` calls before it took without a `release`.

    Returns:
        The expressions, each with the line that took it.
    """
    entered: list[tuple[ast.expr, int]] = []
    acquired: dict[str, tuple[ast.expr, int]] = {}
    for node in sorted(own_nodes(function), key=lambda each: getattr(each, "lineno", 0)):
        match node:
            case ast.With(body=body) if body[0].lineno <= line <= (body[-1].end_lineno or 0):
                entered += [(item.context_expr, node.lineno) for item in node.items if item.context_expr.lineno < line]
            case ast.Call(func=ast.Attribute(value=lock, attr="acquire")) if node.lineno < line:
                acquired[ast.unparse(lock)] = (lock, node.lineno)
            case ast.Call(func=ast.Attribute(value=lock, attr="release")) if node.lineno < line:
                acquired.pop(ast.unparse(lock), None)
    return [*entered, *acquired.values()]


def makes_number(call: ast.Call) -> bool:
    """Whether the result of a call is plainly a Python value: `loss.item()`, `float(loss)`, but not `loss.float()`."""
    return callee(call) in (_NUMBER_METHODS if isinstance(call.func, ast.Attribute) else _NUMBER_FUNCTIONS)


def cuts_graph(call: ast.Call) -> bool:
    """Whether the result of a call leads to no autograd graph, by the name of the function or method alone."""
    name, is_method = callee(call), isinstance(call.func, ast.Attribute)
    if is_method:
        return name in _NUMBER_METHODS | _DETACHING_METHODS | _INTEGER_METHODS
    return name in _NUMBER_FUNCTIONS | _PLAIN_FUNCTIONS


def runs_backward(call: ast.Call) -> bool:
    """Whether a call runs a backward pass, by the name of the function or method alone."""
    return callee(call) in BACKWARD_CALLS


def calls_backward(tree: ast.AST) -> bool:
    """Whether a backward pass is called anywhere in a piece of source, functions inside of it included."""
    return any(isinstance(node, ast.Call) and runs_backward(node) for node in ast.walk(tree))
