"""What well-known functions and methods do, by their names: leave the graph, add to a container, run a backward."""

from __future__ import annotations

import ast

from torchmedic.source.syntax import callee

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
