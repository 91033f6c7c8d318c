"""Public names are documented and declared: what a reader of the code may rely on."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from deepinfra import errors

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "deepinfra").rglob("*.py"))
PUBLIC_API = [
    path
    for path in MODULES
    if path.parent.name in ("interfaces", "config")
    or path.name in ("registry.py", "hookspecs.py", "app.py", "engine.py", "opening.py")
]

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definitions(node: ast.Module | ast.ClassDef, at: str = "") -> Iterator[tuple[str, Definition]]:
    """Public classes, functions and methods, with the names of their classes before them."""
    for each in node.body:
        if isinstance(each, Definition) and not each.name.startswith("_"):
            yield at + each.name, each
            if isinstance(each, ast.ClassDef):
                yield from definitions(each, f"{at}{each.name}.")


def declared(path: Path) -> list[str] | None:
    """Names in `__all__`, as written."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.Tuple), f"{path}: __all__ is no tuple"
            return [str(ast.literal_eval(each)) for each in node.value.elts]
    return None


def bound(path: Path) -> set[str]:
    """Names that a module binds at its top, those for type checkers and lazily loaded ones too."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def is_a_law(where: str, node: Definition) -> bool:
    """Laws of the kits and rules of their machines: what they check is in their names."""
    marks = [ast.unparse(mark).partition("(")[0] for mark in node.decorator_list]
    return node.name.startswith(("test_", "teardown")) or bool(
        {"rule", "invariant", "initialize", "precondition"} & set(marks)
    )


def test_every_public_name_has_a_docstring_with_a_first_line() -> None:
    wrong = []
    for path in MODULES:
        if not (ast.get_docstring(tree(path)) or "").partition("\n")[0].strip():
            wrong.append(name_of(path))
        for where, node in definitions(tree(path)):
            first = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            if not first and not is_a_law(where, node):
                wrong.append(f"{name_of(path)}.{where}")
    assert wrong == []


def test_what_a_module_declares_it_has() -> None:
    wrong = []
    for path in MODULES:
        names = declared(path) or []
        wrong += [f"{name_of(path)}.{name}" for name in names if name not in bound(path)]
        assert len(names) == len(set(names)), path
    assert wrong == []


def test_what_another_module_imports_is_declared() -> None:
    """A name without `_` that is not in `__all__` is a module's own business."""
    paths = {name_of(path): path for path in MODULES}
    wrong = set()
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module in paths:
                names = declared(paths[node.module])
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}" in paths
                    if not submodule and (names is None or alias.name not in names):
                        wrong.add(f"{node.module}.{alias.name}")
    assert sorted(wrong) == []


def raised(function: Function) -> set[str]:
    """Names of our errors that a function raises itself, outside of what it handles itself."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition | ast.Lambda) or (isinstance(node, ast.Try) and node.handlers):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(error, ast.Name) and error.id in errors.__all__:
                found.add(error.id)
        waiting += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", PUBLIC_API, ids=name_of)
def test_the_public_interface_says_what_it_raises(path: Path) -> None:
    wrong = []
    for where, node in definitions(tree(path)):
        if isinstance(node, Function):
            text = ast.get_docstring(node) or ""
            told = "Raises" in text or "See `" in text or "; see `" in text
            wrong += [f"{where}: {error}" for error in raised(node) if not told]
    assert wrong == []


_RAISES = re.compile(r"^(\s*)Raises(?: \([^)]*\))?:\n((?:\1\s+.*\n?|\s*\n)+)", re.MULTILINE)


def test_every_raises_section_names_errors_that_exist() -> None:
    known = {*dir(builtins)}
    known |= {node.name for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}
    wrong, seen = [], 0
    for path in MODULES:
        for where, node in definitions(tree(path)):
            for section in _RAISES.findall(ast.get_docstring(node) or ""):
                entries = re.findall(rf"^{section[0]}    (\w[\w ,.]*):", section[1], re.MULTILINE)
                seen += len(entries)
                for entry in entries:
                    names = re.split(r", | or ", entry)
                    wrong += [f"{name_of(path)}.{where}: {name}" for name in names if name not in known]
    assert wrong == []
    assert seen > 100
