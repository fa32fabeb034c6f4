"""What fills and empties a container of the user's, under its own name and under others that it is given."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchmedic.evidence.leaks.source.fresh_starts import begins_again
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.loop_names import loop_names
from torchmedic.evidence.leaks.source.sites import Site, Traffic, functions_of, is_empty, nodes_of
from torchmedic.evidence.leaks.source.training_loops import training_loops
from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import flat, is_new
from torchmedic.source.syntax import CALLABLES, callee, first_line, last_name, nodes_in
from torchmedic.source.vocabulary import cuts_graph

_DEPTH = 2  # names that one holder is given in turn


def of_container(held: Held, files: list[str]) -> Traffic:
    """Every line that may change it, those that put tensors in before those that put in numbers."""
    owner, _, attribute = re.sub(r"\[.*?\]", "", held.name).rpartition(".")
    if owner and attribute != held.last and attribute.isidentifier():
        # It belongs to a class of a library, but the user's code may well reach into it.
        direct = _under_name(held._replace(last=attribute, local=0), files)
        if direct.puts:
            return direct
    found = _under_name(held, files)
    if not found.puts and owner.isidentifier() and owner != "self" and held.kind == "bytes":
        whole = _under_name(held._replace(name=owner, last=owner, owners=()), files)
        if whole.puts:
            return whole  # `table = table.concat(rows)`
    # A class may go by another name than the one that the source gives it.
    return found if found.puts or not held.owners else _under_name(held._replace(owners=()), files)


def _under_name(held: Held, files: list[str], depth: int = _DEPTH) -> Traffic:
    name = HolderName(held)
    puts: list[Site] = []
    takes: list[Site] = []
    for file in files:
        for node, path in nodes_of(file):
            if not name.may_stand(file, path):
                continue
            here = name.at(path)
            for value in here.puts(node):
                puts.append(Site(file, node, value, path))  # type: ignore[arg-type]
            if here.takes(node) or here.drains(node, path):
                takes.append(Site(file, node, None, path))  # type: ignore[arg-type]
            elif (new := here.starts(node)) is not None:
                takes.append(Site(file, node, new, path))  # type: ignore[arg-type]
    others = [_under_name(other, [other.file], depth - 1) for other in _renamed(name, held, files)] if depth else []
    if not puts:
        puts = [site for other in others for site in other.puts if not _binds(site.node)] or list(_stored(name, files))
    given_back = [site for site in puts if _gives_new(site, files)]  # `losses = shown(losses)`
    puts = [site for site in puts if site not in given_back]
    takes += [site._replace(value=None) for site in given_back]
    if held.kind == "age":
        cuts = [site for site in puts if _cuts(site.value, files)]
        puts = [site for site in puts if site not in cuts]
        takes += [site._replace(value=None) for site in cuts]
    if not puts and held.kind == "age":
        # It is made from its own last value, if by way of another variable.
        anew = [site for site in takes if not (site.value is None or site.builds or is_empty(site.value))]
        puts = [site for site in anew if _leads_back(site, held.last, files)]
        takes = [site for site in takes if site not in puts]
    # `kept.setdefault(key, []).append(loss)` puts in twice: the whole of it counts.
    longest = {
        (site.file, site.node.lineno): site for site in sorted(puts, key=lambda site: site.node.end_col_offset or 0)
    }
    keys = frozenset(re.findall(r"\['([^']*)'\]", held.name))
    puts = sorted(
        longest.values(),
        key=lambda site: (site.is_little, not name.speaks_of(keys, site.node), puts.index(site)),
    )
    starts = [site for site in takes if site.value is not None]
    takes = [site for site in takes if site.value is None or begins_again(site, starts, puts, files)]
    # To bind another name anew empties nothing.
    takes += [site for other in others for site in other.takes if site.value is None]
    limited = bool(puts) and all(_is_limited(name, site, files) or _ends(site, held) for site in puts)
    return Traffic(puts, takes, limited or any(other.is_limited for other in others))


def _is_limited(name: HolderName, site: Site, files: list[str]) -> bool:
    """Whether it is filled only up to a length. A branch that trains says when to train, not what to keep."""
    branches = [node for node in site.path if isinstance(node, ast.If)]
    training = training_loops([site.file, *files]) if branches else None
    path = [node for node in site.path if node not in branches or not (training and training.leads_to_backward([node]))]
    return name.at(site.path).limits(site.node.lineno, tuple(path))


def _ends(site: Site, held: Held) -> bool:
    """Whether it stands in a loop that goes on only until another container is empty: `while pool:`."""
    for loop in site.loops:
        if not isinstance(loop, ast.While):
            continue
        for source in _names(loop.test):
            name = HolderName(held._replace(name=source, last=source, owners=()))
            inside = [node for statement in loop.body for node in ast.walk(statement)]
            takes = [node for node in inside if name.takes(node)]
            puts = [node for node in inside if any(True for _ in name.puts(node))]
            if source != held.last and takes and all(node in takes for node in puts):
                return True
    return False


def _gives_new(site: Site, files: list[str]) -> bool:
    """Whether the holder is set to what a function of the user's returns, and that may be a new container."""
    if not isinstance(site.node, ast.Assign) or not isinstance(site.value, ast.Call):
        return False
    if any(isinstance(each, ast.Subscript) for each in site.node.targets):
        return False  # one item of it
    functions = [function for _, function in functions_of(callee(site.value), [site.file, *files])]
    returned = [node.value for each in functions for node in ast.walk(each) if isinstance(node, ast.Return)]
    return any(value is not None and is_new(value) for value in returned)


def _cuts(value: ast.expr | None, files: list[str]) -> bool:
    """Whether a value has no graph, by a call that stands around all of it: `h.detach()`, or several such."""
    match value:
        case ast.Call(func=ast.Attribute(attr=method, value=owner), args=args):
            return cuts_graph(value) or (not args and _cuts(owner, files)) or _cuts_inside(method, files)
        case ast.Attribute(attr="data"):
            return True
        case ast.Call(func=ast.Name(id="tuple" | "list"), args=[inner]):
            return _cuts(inner, files)
        case ast.Call(func=ast.Name(id=name)):
            return _cuts_inside(name, files)
        case ast.GeneratorExp(elt=inner) | ast.ListComp(elt=inner) | ast.DictComp(value=inner):
            return _cuts(inner, files)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return bool(elements) and all(_cuts(each, files) for each in elements)
    return False


def _cuts_inside(name: str, files: list[str]) -> bool:
    """Whether a function of the user's does so, as far as one look at it shows."""
    returned = [
        node.value
        for _, function in functions_of(name, files)
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]
    return any(isinstance(part, ast.Call) and callee(part) == "detach" for each in returned for part in ast.walk(each))


def _leads_back(site: Site, name: str, files: list[str]) -> bool:
    """Whether a value is made from the variable that it is assigned to, through others or through functions."""
    pending, seen = _names(site.value), set[str]()
    while pending:
        other = pending.pop()
        if other == name:
            return True
        if other in seen:
            continue
        seen.add(other)
        for node, _ in nodes_of(site.file):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and other in _targets(node):
                pending |= _names(node.value)
        for _, function in functions_of(other, files):
            pending |= _names(function)
    return False


def _names(tree: ast.AST | None) -> set[str]:
    nodes = list(nodes_in(tree))
    return {each.id for each in nodes if isinstance(each, ast.Name)} | {
        each.attr for each in nodes if isinstance(each, ast.Attribute)
    }


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part.value if isinstance(part, ast.Subscript) else part for part in flat(targets)]
    return {last_name(part) for part in parts}


def _renamed(name: HolderName, held: Held, files: list[str]) -> Iterator[Held]:
    """The same holder under other names: a variable that it is assigned to, an argument, `self` in its own class."""
    plain = held._replace(own="", owners=())
    for file in files:
        for node, path in nodes_of(file):
            if not name.may_stand(file, path):
                continue
            function = next((each for each in reversed(path) if isinstance(each, CALLABLES)), None)
            for other in loop_names(name.at(path), path, is_item=held.name.endswith("]")):
                yield plain._replace(name=other, last=other, file=file, local=first_line(function) if function else 0)
            match node:
                case ast.Assign(targets=[ast.Name(id=other)], value=value) if name.at(path).is_given_by(value):
                    local = first_line(function) if function is not None else 0
                    yield plain._replace(name=other, last=other, file=file, local=local)
                case ast.Call():
                    yield from _arguments(name.at(path), node, plain, [file, *files])
    for file, method in _methods(held.own, files):
        yield plain._replace(name="self", last="self", file=file, local=first_line(method))


def _arguments(name: HolderName, call: ast.Call, held: Held, files: list[str]) -> Iterator[Held]:
    for function_name, arguments, is_method in _handed_on(call):
        given = [(number, "") for number, each in enumerate(arguments) if name.is_meant_by(each)]
        given += [(-1, each.arg or "") for each in call.keywords if name.is_meant_by(each.value)]
        for file, function in functions_of(function_name, files) if given else ():
            parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            if is_method and parameters[:1] in (["self"], ["cls"]):
                parameters = parameters[1:]
            for number, keyword in given:
                inner = keyword or (parameters[number] if number < len(parameters) else "")
                if inner:
                    yield held._replace(name=inner, last=inner, file=file, local=first_line(function))


def _handed_on(call: ast.Call) -> Iterator[tuple[str, list[ast.expr], bool]]:
    """The functions that get the arguments of a call: its own, one that is handed in first, or as `target`."""
    yield callee(call), call.args, isinstance(call.func, ast.Attribute)
    for number, each in enumerate(call.args[:-1]):  # `partial(log, losses)`, `pool.submit(log, losses)`
        if isinstance(each, ast.Name | ast.Attribute):
            yield (
                last_name(each),
                call.args[number + 1 :],
                isinstance(each, ast.Attribute),
            )
    named = {each.arg: each.value for each in call.keywords}
    target, arguments = named.get("target"), named.get("args")  # `Thread(target=log, args=(losses,))`
    if isinstance(target, ast.Name | ast.Attribute) and isinstance(arguments, ast.Tuple | ast.List):
        yield (
            last_name(target),
            arguments.elts,
            isinstance(target, ast.Attribute),
        )


def _methods(owner: str, files: list[str]) -> Iterator[tuple[str, ast.AST]]:
    for file in files if owner else ():
        for _, path in nodes_of(file):
            if any(isinstance(each, ast.ClassDef) and each.name == owner for each in path):
                function = next((each for each in reversed(path) if isinstance(each, CALLABLES)), None)
                if function is not None:
                    yield file, function


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def _stored(name: HolderName, files: list[str]) -> Iterator[Site]:
    for file in files:
        for node, path in nodes_of(file):
            if name.may_stand(file, path) and (value := name.at(path).stores(node)) is not None:
                yield Site(file, node, value, path)  # type: ignore[arg-type]
