"""The lines that fill and empty a container of the user's, under its own name and under others that it is given."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.length_checks import begins_again, is_limited
from torchmedic.evidence.leaks.source.sites import Site, Traffic, functions_of, nodes_of, parameters_of, values_returned
from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import is_new
from torchmedic.source.syntax import COMPREHENSIONS, Path, callee, cuts_graph, first_line, function_around, last_name

_ITEM_GIVERS = frozenset({"list", "tuple", "reversed", "sorted", "values"})  # give the items of their argument


def of_container(held: Held, files: list[str]) -> Traffic:
    """Every line that may change a container, those that put tensors in before those that put in numbers."""
    owner, _, attribute = re.sub(r"\[.*?\]", "", held.name).rpartition(".")
    if owner and attribute != held.last and attribute.isidentifier():
        # It belongs to a class of a library, but the user's code may well reach into it.
        direct = _under_name(held._replace(last=attribute, local=0), files)
        if direct.puts:
            return direct
    found = _under_name(held, files)
    # A class may go by another name than the one that the source gives it.
    return found if found.puts or not held.owners else _under_name(held._replace(owners=()), files)


def _under_name(held: Held, files: list[str], *, with_aliases: bool = True) -> Traffic:
    name = HolderName(held)
    puts, takes = _changes(name, files)
    others = (
        [_under_name(other, [other.file], with_aliases=False) for other in aliases(name, held, files)]
        if with_aliases
        else []
    )
    if not puts:
        puts = [site for other in others for site in other.puts if not _binds(site.node)] or list(_stored(name, files))
    anew = [site for site in puts if _is_renewed(site, files) or (held.kind == "age" and _cuts(site.value, files))]
    puts = _sorted(name, [site for site in puts if site not in anew])
    starts = [site for site in takes if site.value is not None]
    takes = [site for site in takes if site.value is None or begins_again(site, starts, puts, files)]
    takes += [site._replace(value=None) for site in anew]
    # To bind another name anew empties nothing.
    takes += [site for other in others for site in other.takes if site.value is None]
    limited = bool(puts) and all(is_limited(name, site) for site in puts)
    return Traffic(puts, takes, limited or any(other.is_limited for other in others))


def _changes(name: HolderName, files: list[str]) -> tuple[list[Site], list[Site]]:
    """The lines that add to a holder, and those that take from it or make it anew, with the new value then."""
    puts: list[Site] = []
    takes: list[Site] = []
    for file in files:
        for node, path in nodes_of(file):
            if not name.may_stand(file, path):
                continue
            here = name.at(path)
            puts += [Site(file, node, value, path) for value in here.puts(node)]  # type: ignore[arg-type]
            if here.takes(node) or here.drains(node, path):
                takes.append(Site(file, node, None, path))  # type: ignore[arg-type]
            elif (new := here.starts(node)) is not None:
                takes.append(Site(file, node, new, path))  # type: ignore[arg-type]
    return puts, takes


def _stored(name: HolderName, files: list[str]) -> Iterator[Site]:
    for file in files:
        for node, path in nodes_of(file):
            if name.may_stand(file, path) and (value := name.at(path).stores(node)) is not None:
                yield Site(file, node, value, path)  # type: ignore[arg-type]


def _sorted(name: HolderName, puts: list[Site]) -> list[Site]:
    """One site per line, tensors before numbers, the holder's own key before others."""
    # `kept.setdefault(key, []).append(loss)` puts in twice: the whole of it counts.
    by_length = sorted(puts, key=lambda site: site.node.end_col_offset or 0)
    longest = {(site.file, site.node.lineno): site for site in by_length}
    return sorted(
        longest.values(), key=lambda site: (site.is_little, name.names_other_keys(site.node), puts.index(site))
    )


def _is_renewed(site: Site, files: list[str]) -> bool:
    """Whether the holder is set to what a function of the user's returns, and that may be a new container."""
    if not isinstance(site.node, ast.Assign) or not isinstance(site.value, ast.Call):
        return False
    if any(isinstance(each, ast.Subscript) for each in site.node.targets):
        return False  # one item of it
    return any(is_new(value) for value in values_returned(callee(site.value), [site.file, *files]))


def _cuts(value: ast.expr | None, files: list[str]) -> bool:
    """Whether a value has no graph, by a call that stands around all of it: `h.detach()`, or several such."""
    match value:
        case ast.Attribute(attr="data"):
            return True
        case ast.Call(func=ast.Name(id="tuple" | "list"), args=[inner]):
            return _cuts(inner, files)
        case ast.Call(func=ast.Attribute(value=owner), args=[]) if _cuts(owner, files):
            return True
        case ast.Call():
            returned = [part for each in values_returned(callee(value), files) for part in ast.walk(each)]
            return cuts_graph(value) or any(
                isinstance(each, ast.Call) and callee(each) == "detach" for each in returned
            )
        case ast.GeneratorExp(elt=inner) | ast.ListComp(elt=inner) | ast.DictComp(value=inner):
            return _cuts(inner, files)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return bool(elements) and all(_cuts(each, files) for each in elements)
    return False


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def aliases(name: HolderName, held: Held, files: list[str]) -> Iterator[Held]:
    """The holder once more under each of its other names."""
    plain = held._replace(own="", owners=())
    for file in files:
        for node, path in nodes_of(file):
            if not name.may_stand(file, path):
                continue
            here, function = name.at(path), function_around(path)
            others = set(_loop_variables(here, path, is_item=held.name.endswith("]")))
            match node:
                case ast.Assign(targets=[ast.Name(id=other)], value=value) if here.is_meant_by(value):
                    others.add(other)
                case ast.Call():
                    yield from _parameters(here, node, plain, [file, *files])
            local = first_line(function) if function is not None else 0
            yield from (plain._replace(name=other, last=other, file=file, local=local) for other in sorted(others))
    for file, method in _methods(held.own, files):
        yield plain._replace(name="self", last="self", file=file, local=first_line(method))


def _methods(owner: str, files: list[str]) -> Iterator[tuple[str, ast.AST]]:
    for file in files if owner else ():
        for _, path in nodes_of(file):
            if any(isinstance(each, ast.ClassDef) and each.name == owner for each in path):
                function = function_around(path)
                if function is not None:
                    yield file, function


def _parameters(name: HolderName, call: ast.Call, held: Held, files: list[str]) -> Iterator[Held]:
    """The parameters of functions of the user's that a call gives the holder to."""
    for function_name, arguments in _calls_made(call):
        given = [number for number, each in enumerate(arguments) if name.is_meant_by(each)]
        keywords = [each.arg for each in call.keywords if each.arg and name.is_meant_by(each.value)]
        for file, function in functions_of(function_name, files) if given or keywords else ():
            parameters = parameters_of(function)
            for inner in (*(parameters[number] for number in given if number < len(parameters)), *keywords):
                yield held._replace(name=inner, last=inner, file=file, local=first_line(function))


def _calls_made(call: ast.Call) -> Iterator[tuple[str, list[ast.expr]]]:
    """The function that is called with its arguments, and functions handed in to be called: `partial(log, losses)`."""
    yield callee(call), call.args
    for number, each in enumerate(call.args[:-1]):
        if name := last_name(each):
            yield name, call.args[number + 1 :]
    named = {each.arg: each.value for each in call.keywords}
    target, arguments = named.get("target"), named.get("args")  # `Thread(target=log, args=(losses,))`
    if target is not None and isinstance(arguments, ast.Tuple | ast.List):
        yield last_name(target), arguments.elts


def _loop_variables(name: HolderName, path: Path, *, is_item: bool) -> Iterator[str]:
    """The variables that stand for the holder in the loops and comprehensions around a line.

    Args:
        name: The holder's.
        path: What stands around the line.
        is_item: Whether the holder is one of several, which a loop may go over: `for values in history.values():`.
    """
    for loop in path:
        if isinstance(loop, ast.For):
            yield from _targets(name, loop.target, loop.iter, is_item=is_item)
        elif isinstance(loop, COMPREHENSIONS):
            for each in loop.generators:
                yield from _targets(name, each.target, each.iter, is_item=is_item)


def _targets(name: HolderName, target: ast.expr, source: ast.expr, *, is_item: bool) -> Iterator[str]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
    match source:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            is_meant = any(name.is_meant_by(each) for each in elements)  # `for each in (losses, scores):`
        case ast.Call(func=ast.Attribute(attr="items", value=whole)):
            is_meant, target = is_item and name.is_meant_by(whole), parts[-1] if parts else target
        case ast.Call(func=ast.Attribute(attr="values", value=whole)):
            is_meant = is_item and name.is_meant_by(whole)
        case ast.Call(args=[first, *_]) if callee(source) == "enumerate" and parts:
            yield from _targets(name, parts[-1], first, is_item=is_item)
            return
        case ast.Call(args=args) if callee(source) == "zip":
            for part, each in zip(parts, args, strict=False):
                yield from _targets(name, part, each, is_item=is_item)
            return
        case ast.Call(args=[first]) if callee(source) in _ITEM_GIVERS:
            yield from _targets(name, target, first, is_item=is_item)
            return
        case _:
            is_meant = is_item and name.is_meant_by(source)
    if is_meant and isinstance(target, ast.Name):
        yield target.id
