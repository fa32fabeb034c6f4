"""Where a layer was built: the call in the user's own code that made it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from torchmedic.records import Location
from torchmedic.source.bindings import assignment_before, assignments, binds, own_statements
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.objects.parts import attributes, is_users
from torchmedic.source.syntax import FUNCTIONS, callee, calls_in, nodes_in, syntax_tree

_CONTAINERS = frozenset("Sequential ModuleList ModuleDict ParameterList ParameterDict".split())
_MAX_TABLE = 16  # modules of a dict


def module_path(frames: list[Frame], module: nn.Module) -> tuple[nn.Module, str] | None:
    """The user's module that owns another one, and the dotted name below it: `(net, "features.3")`."""
    for frame in reversed(frames):
        owner = frame.module
        if owner is None or owner is module or not frame.is_user:
            continue
        for name, child in owner.named_modules():
            if child is module and name:
                return owner, name
    return None


def built_at(frames: list[Frame], module: nn.Module, label: str) -> Location | None:
    """The line on which a layer was built: the call inside `self.name = ...` of its owner's class, or a variable."""
    owned = module_path(frames, module)
    if owned is not None:
        node = built_below(*owned, type(module))
        if node is not None:
            return node_location("origin", node[0], node[1], label)
    for frame, owner, name, root in held_modules(frames):
        path = next((path for path, child in root.named_modules() if child is module), None)
        if path is None:
            continue
        node = built_below(root, path, type(module)) if path else None
        if node is None and owner is not None:
            node = _built_in_class(type(owner), f"{name}.{path}".rstrip("."), type(module))
            if node is not None and isinstance(node[1], ast.Name):
                node = None  # `self.model = model`: built by the caller
        elif node is None:
            node = _built_in_module(frame, name, path.split(".") if path else [])
        if node is not None:
            return node_location("origin", node[0], node[1], label)
    return None


def held_modules(frames: list[Frame]) -> Iterator[tuple[Frame, Any, str, nn.Module]]:
    """Every module that a variable of the user's frames holds, or an attribute of `self`, innermost frame first.

    Yields:
        The frame, the object whose attribute it is, or None for a variable, the name, and the module.
    """
    for frame in reversed(frames):
        for name, value in [*frame.variables.items(), *frame.live.f_globals.items()] if frame.is_user else ():
            if name == "self" and not isinstance(value, nn.Module):
                for attribute, item in attributes(value, type(value)):
                    yield from ((frame, value, *each) for each in _modules_in(attribute, item))
            else:
                yield from ((frame, None, *each) for each in _modules_in(name, value))


def _modules_in(name: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    """A module, or the modules of a dict with their names: `nets["G"]` is `nets.G`."""
    if isinstance(value, nn.Module) and "_modules" in value.__dict__:  # its constructor may not have run yet
        yield name, value
    elif type(value) is dict and len(value) <= _MAX_TABLE:
        yield from ((f"{name}.{key}", item) for key, item in list(value.items()) if isinstance(item, nn.Module))


def given_modules(frames: list[Frame]) -> Iterator[nn.Module]:
    """The modules of the user's classes that variables of a library's frames hold: a Trainer may be the only holder."""
    for frame in reversed(frames):
        for value in () if frame.is_user else frame.variables.values():
            if isinstance(value, nn.Module) and is_users(type(value)):
                yield value


def built_below(root: nn.Module, path: str, kind: type) -> tuple[str, ast.expr] | None:
    """Start from the innermost module on the path whose class is written out somewhere: torch's own are not."""
    parts = path.split(".")
    chain: list[tuple[nn.Module, str]] = []
    module: nn.Module | None = root
    for position, part in enumerate(parts):
        if module is None:
            break
        chain.append((module, ".".join(parts[position:])))
        module = module._modules.get(part)
    for owner, rest in reversed(chain):
        if not type(owner).__module__.startswith("torch."):
            return _built_in_class(type(owner), rest, kind)
    return None


def _built_in_module(frame: Frame, name: str, path: list[str]) -> tuple[str, ast.expr] | None:
    """`model = nn.Sequential(...)` in a frame, or in its file if that is the only assignment of the name."""
    if not name or frame.tree is None:
        return None
    own = assignment_before(frame, name)
    if isinstance(own, ast.Assign):
        call = _descend(own.value, path)
        return (frame.file, call) if isinstance(call, ast.Call) else None
    if assignments(frame, name) and name in frame.variables and frame.function != "<module>":
        return None
    bodies = [frame.tree, *(node for node in ast.walk(frame.tree) if isinstance(node, ast.FunctionDef))]
    made = [
        statement
        for body in bodies
        for statement in own_statements(body)
        if isinstance(statement, ast.Assign) and binds(statement, name)
    ]
    if len(made) != 1:
        return None
    call = _descend(made[0].value, path)
    return (frame.file, call) if isinstance(call, ast.Call) else None


def class_node(kind: type) -> tuple[str, ast.ClassDef] | None:
    """The syntax of a class, found through the first line of one of its own methods."""
    if kind.__module__.startswith("torch.") or kind is object:
        return None
    codes = [
        code
        for member in kind.__dict__.values()
        if isinstance(code := getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None), _CODE)
        and code.co_qualname.rpartition(".")[0] == kind.__qualname__
    ]
    for code in codes:
        tree = syntax_tree(code.co_filename)
        for node in nodes_in(tree):
            if (
                isinstance(node, ast.ClassDef)
                and node.name == kind.__name__
                and node.lineno <= code.co_firstlineno <= (node.end_lineno or node.lineno)
            ):
                return code.co_filename, node
    return None


_CODE = type(class_node.__code__)


def class_nodes(kind: type) -> Iterator[tuple[str, ast.ClassDef]]:
    """The syntax of a class and of its bases, as far as there is source."""
    return filter(None, map(class_node, kind.__mro__))


def _built_in_class(owner: type, path: str, kind: type | None = None) -> tuple[str, ast.expr] | None:
    """The call that built `self.<path>` in a class or its bases; None where several could have."""
    head, *rest = path.split(".")
    for file, body in class_nodes(owner):
        made = list(_values_of(body, head))
        calls = [call for value in made if (call := _descend(value, rest)) is not None]
        if kind is not None and len(made) > 1:
            calls = [call for call in calls if _called_name(call) == kind.__name__]
        if kind is not None and (len(calls) != 1 or _called_name(calls[0]) != kind.__name__):
            # Built in a loop, by a list or by a helper: the only constructor of that kind in the class must be it.
            only: list[ast.expr] = [node for node in calls_in(body) if _called_name(node) == kind.__name__]
            only = [node for node in only if not _is_another_attribute(body, head, node)]
            calls = only if len(only) == 1 else calls
        if len(calls) == 1:
            return file, calls[0]
        if made:
            return None
    return None


def _is_another_attribute(body: ast.ClassDef, attr: str, call: ast.expr) -> bool:
    """Whether a call is all that another attribute of the object is: `self.out = nn.Conv2d(...)`."""
    own = own_names(body)
    return any(
        isinstance(node, ast.Assign)
        and node.value is call
        and all(isinstance(target, ast.Attribute) and not is_attribute_of(target, attr, own) for target in node.targets)
        for node in ast.walk(body)
    )


def own_names(body: ast.ClassDef) -> frozenset[str]:
    """What the methods of a class call their object: `self`, whatever somebody else calls it."""
    methods = (node for node in body.body if isinstance(node, FUNCTIONS))
    return frozenset({"self"} | {method.args.args[0].arg for method in methods if method.args.args})


def _values_of(body: ast.ClassDef, attr: str) -> Iterator[ast.expr]:
    own = own_names(body)
    for node in ast.walk(body):
        match node:
            case ast.Assign(targets=targets, value=value):
                if any(is_attribute_of(target, attr, own) for target in targets):
                    yield value
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                if is_attribute_of(target, attr, own):
                    yield value
            case ast.Call(func=ast.Attribute(attr="add_module"), args=[ast.Constant(value=name), value]):
                if name == attr:
                    yield value


def is_attribute_of(node: ast.AST, attr: str, names: frozenset[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attr
        and isinstance(node.value, ast.Name)
        and node.value.id in names
    )


def _called_name(node: ast.expr) -> str:
    return callee(node) if isinstance(node, ast.Call) else ""


def _descend(node: ast.expr, path: list[str]) -> ast.expr | None:
    """From `nn.Sequential(a, b, c)` and `["1"]` to the expression of `b`."""
    for part in path:
        arguments: list[ast.expr] = node.args if isinstance(node, ast.Call) and callee(node) in _CONTAINERS else []
        if len(arguments) == 1:
            match arguments[0]:
                case ast.List(elts=items) | ast.Tuple(elts=items):
                    arguments = items
                case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
                    node = item
                    continue
                case ast.Dict(keys=keys, values=values):
                    named: dict[Any, ast.expr] = {
                        key.value: value
                        for key, value in zip(keys, values, strict=True)
                        if isinstance(key, ast.Constant)
                    }
                    if part not in named:
                        return node
                    node = named[part]
                    continue
                case ast.Call(func=function, args=[ast.List(elts=pairs)]) if "OrderedDict" in ast.unparse(function):
                    chosen = [pair.elts[1] for pair in pairs if _is_pair(pair, part)]  # type: ignore[attr-defined]
                    if len(chosen) != 1:
                        return node
                    node = chosen[0]
                    continue
        if not part.isdigit() or any(isinstance(item, ast.Starred) for item in arguments):
            return node
        if int(part) >= len(arguments):
            return node
        node = arguments[int(part)]
    return node


def _is_pair(node: ast.expr, name: str) -> bool:
    match node:
        case ast.Tuple(elts=[ast.Constant(value=own), _]):
            return bool(own == name)
    return False
