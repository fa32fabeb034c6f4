"""What every rule says of itself, read from its source: `explain` must work where torch is not installed."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import msgspec

from torchmedic.diagnose import registry

FAMILIES = {
    "1": "autograd, shapes, dtypes, modules",
    "2": "NaN and infinity",
    "3": "devices, labels and indices",
    "4": "memory",
    "5": "hangs",
    "6": "silent mistakes in the training loop",
    "7": "several ranks",
    "8": "process, data loading, host",
    "9": "cause not known",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    name: str
    summary: str
    doc: str

    @property
    def family(self) -> str:
        return FAMILIES[self.code[2]]

    @property
    def cure(self) -> str:
        """The first sentence on the cure."""
        found = re.search(r"^Cure: (.+?)\.?(?:\s*\Z|\n\n|(?<=\.)\s)", self.doc, re.DOTALL | re.MULTILINE)
        return " ".join(found[1].split()) if found is not None else ""


def entries() -> list[Entry]:
    """All registered rules, by code."""
    return sorted((read(rule) for rule in registry.ALL), key=lambda entry: entry.code)


def find(code: str, name: str = "") -> Entry | None:
    """A rule by its code or its name, in any case. With the code and the name of a diagnosis one file is read."""
    wanted = code.strip().lower()
    module = "." + (name or wanted).replace("-", "_")  # a module is called like its rule
    likely_first = sorted(registry.ALL, key=lambda rule: not rule.endswith(module))
    naming = (rule for rule in likely_first if f'"{wanted}"' in _source(rule).lower())  # to parse all takes long
    return next((entry for entry in map(read, naming) if wanted in (entry.code.lower(), entry.name)), None)


def explain(code: str) -> str:
    """What a diagnosis means, why it happens, and how it is cured: the text of `torchmedic explain`.

    Args:
        code: A code such as `"TM201"`, or a name such as `"division-by-zero"`.

    Raises:
        LookupError: There is no such diagnosis.
    """
    found = find(code)
    if found is None:
        raise LookupError(f"there is no diagnosis {code}")
    return f"{found.code} {found.name}\n\n{found.doc}"


def paragraphs(doc: str) -> tuple[str, ...]:
    """Text whose lines may be broken anew; lists and code keep their lines."""
    parts = doc.split("\n\n")
    return tuple(part if re.search(r"^(\s|[-*] )", part, re.MULTILINE) else " ".join(part.split()) for part in parts)


def read(rule: str) -> Entry:
    """What the source of one registered rule says."""
    tree = ast.parse(_source(rule))
    doc = inspect.cleandoc(ast.get_docstring(tree) or "")
    code, name = _identity(tree)
    return Entry(code=code, name=name, summary=doc.splitlines()[0].rstrip("."), doc=doc)


def _source(rule: str) -> str:
    return (Path(__file__).parent / "rules" / (rule.replace(".", "/") + ".py")).read_text(encoding="utf-8")


def _identity(tree: ast.Module) -> tuple[str, str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            match node.decorator_list:
                case [ast.Call(func=ast.Name(id=kind), args=[ast.Constant(code), ast.Constant(name), *_])] if (
                    "rule" in kind
                ):
                    return str(code), str(name)
    raise AssertionError('a rule is a function `check` below @rule("CODE", "name")')
