"""The lines that fill and empty a container of the user's, under its own name and under others that it is given."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchmedic.evidence.leaks.source.aliases import aliases
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.length_checks import begins_again, is_limited
from torchmedic.evidence.leaks.source.sites import Site, Traffic, nodes_of, values_returned
from torchmedic.observe.heap.walk import Held
from torchmedic.source.assignments import is_new
from torchmedic.source.syntax import callee
from torchmedic.source.vocabulary import cuts_graph


def of_container(held: Held, files: list[str]) -> Traffic:
    """Every line that may change a container, those that put tensors in before those that put in numbers."""
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
