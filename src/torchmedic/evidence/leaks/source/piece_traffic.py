"""What fills and cuts something that is no container: a chain or tree of objects, a cached function, an object."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.evidence.leaks.source.container_traffic import of_container
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Site, Traffic, functions_of, is_empty, nodes_of
from torchmedic.observe.heap.walk import Held
from torchmedic.source.syntax import callee


def of_inner(held: Held, files: list[str]) -> Traffic:
    """Pieces may be made at one line and filled at another: then it is the other that matters."""
    whole = held._replace(inner="")
    outer = of_pieces(whole, files) if held.via else of_container(whole, files)
    one = held._replace(name=f"x.{held.inner}", last=held.inner, local=0, via="", inner="", owners=())
    filled = [site for site in of_container(one, files).puts if isinstance(site.node, ast.Call)]
    filled.sort(key=lambda site: not _speaks_of(site.node, held.last))  # others may have an attribute of that name
    return outer._replace(puts=[*filled, *outer.puts])


def _speaks_of(node: ast.AST, name: str) -> bool:
    return any(name in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(node))


def of_pieces(held: Held, files: list[str]) -> Traffic:
    """What fills and cuts something that is no container: a chain or tree of objects, a cached function, an object."""
    plain = held._replace(via="")
    if held.via == "cache":
        return Traffic(list(_cached(plain, files)), list(_cleared(plain, files)), False)
    if held.via == "attributes":
        return Traffic([site for site, name in _calls(plain, files) if name == "setattr"], [], False)
    of_head = of_container(plain, files)
    links = HolderName(held._replace(name=f"x.{held.via}", last=held.via, via="", owners=()))
    filled: list[Site] = []
    linked: list[Site] = []
    cut: list[Site] = []
    for file in dict.fromkeys([held.file, *files]):
        for node, path in nodes_of(file) if file else ():
            filled += [Site(file, node, value, path) for value in links.puts(node)]  # type: ignore[arg-type]
            new = links.starts(node)
            site = Site(file, node, new, path)  # type: ignore[arg-type]
            if new is not None and not isinstance(new, ast.Constant):
                linked.append(site)
            elif links.takes(node) or (new is not None and not site.builds and (site.function or site.loops)):
                cut.append(site._replace(value=None))
    # What is taken out of the place where a chain begins takes no link out of it.
    anew = [site for site in of_head.takes if isinstance(site.value, ast.Call | ast.Constant)]
    fresh = [site for site in linked if not (site.builds and is_empty(site.value))]
    made = [site for link in fresh for site in _made(link, files)]
    puts = [
        *(*filled, *of_head.puts, *(site for site in fresh if not site.builds)),
        *(*made, *(site for site in fresh if site.builds)),
    ]
    return Traffic(puts, [*cut, *anew], of_head.is_limited)


def _made(link: Site, files: list[str]) -> Iterator[Site]:
    """Where links are made, if each is told of the next by its class alone."""
    owner = next((each.name for each in reversed(link.path) if isinstance(each, ast.ClassDef)), "")
    for file in files if link.builds and owner else ():
        for node, path in nodes_of(file):
            if isinstance(node, ast.Call) and callee(node) == owner:
                site = Site(file, node, None, path)
                if site.loops or site.function is not None:
                    yield site


def _cached(held: Held, files: list[str]) -> Iterator[Site]:
    """Where a function was given a cache: the line above it, or an assignment."""
    for file, function in functions_of(held.last, [held.file, *files]):
        for decorator in function.decorator_list:
            if "cache" in ast.unparse(decorator):
                yield Site(file, decorator, None, ())
    name = HolderName(held)
    for file in dict.fromkeys([held.file, *files]):
        for node, path in nodes_of(file) if file else ():
            if isinstance(node, ast.Assign) and name.starts(node) is not None and "cache" in ast.unparse(node.value):
                yield Site(file, node, None, path)


def _cleared(held: Held, files: list[str]) -> Iterator[Site]:
    for file in dict.fromkeys([held.file, *files]):
        for node, path in nodes_of(file) if file else ():
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="cache_clear", value=ast.Name(id=name) | ast.Attribute(attr=name))
                ) if name == held.last:
                    yield Site(file, node, None, path)


def _calls(held: Held, files: list[str]) -> Iterator[tuple[Site, str]]:
    """Calls that are given the holder first."""
    name = HolderName(held)
    for file in dict.fromkeys([held.file, *files]):
        for node, path in nodes_of(file) if file else ():
            if isinstance(node, ast.Call) and node.args and name.may_stand(file, path):
                first = node.args[0]
                if name.is_meant_by(first) or (isinstance(first, ast.Name) and first.id == "self"):
                    yield Site(file, node, node.args[-1], path), callee(node)
