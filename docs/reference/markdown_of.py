"""Python to Markdown: tables, fields, signatures and docstrings, for `generate.py`."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo

__all__ = ("accepts", "attribute_table", "class_section", "code", "default", "signature", "table", "text_of")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; `|` inside cells is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: object) -> str:
    """Monospaced, or nothing for nothing."""
    return f"`{text}`" if str(text) else ""


def words(schema: Mapping[str, typing.Any]) -> str:
    """A JSON Schema in a few words."""
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(words(each) for each in schema.get("anyOf", schema.get("oneOf", ()))))
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    if "const" in schema:
        return code(str(schema["const"]).lower())
    if "$ref" in schema:
        return "object"
    kind = str(schema.get("type", "anything"))
    if kind == "array" and "items" in schema:
        inner = words(schema["items"])
        kind = f"array of {inner}" if inner != "anything" else kind
    bounds = [
        f"{sign} {bound(schema[name])}"
        for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if name in schema
    ]
    bounds += [f"at most {schema[name]}" for name in ("maxItems", "maxProperties") if name in schema]
    return kind + (f", {', '.join(bounds)}" if bounds else "")


def bound(number: float) -> str:
    """A limit; powers of two as such."""
    size = abs(number)
    if size >= 2**31 and size == int(size) and int(size) & (int(size) - 1) == 0:
        return f"{'-' if number < 0 else ''}2^{int(size).bit_length() - 1}"
    return f"{number:g}"


def accepts(info: FieldInfo) -> str:
    """What a field takes."""
    annotated: typing.Any = info.annotation
    if info.metadata:
        annotated = typing.Annotated[(annotated, *info.metadata)]
    try:
        return words(TypeAdapter(annotated).json_schema()).removesuffix(" or null")
    except PydanticInvalidForJsonSchema:
        return "see the right"


def default(info: FieldInfo) -> str:
    """A field's default as it would be written in the file."""
    if info.is_required():
        return "required"
    value = info.default
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, tuple):
        return code([each.model_dump(exclude_unset=True) if isinstance(each, BaseModel) else each for each in value])
    if isinstance(value, str):
        return code(f'"{value}"')
    return "none" if value is None else code(value)


def class_section(kind: type) -> str:
    """A class and its public members, in the order of its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    sections = [f"## {kind.__name__}\n\n{text_of(inspect.getdoc(kind))}"]
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and node.name != "__call__":
                continue
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            abstract = " *abstract*" if "abstractmethod" in marks else ""
            line = f"@property {head(node)}" if "property" in marks else head(node)
            title = f"### {kind.__name__}.{node.name}{abstract}"
            sections.append(f"{title}\n\n`{line}`\n\n{text_of(ast.get_docstring(node))}")
        elif isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(after.value, ast.Constant)
            title = f"### {kind.__name__}.{ast.unparse(node.target)}"
            sections.append(f"{title}\n\n`{ast.unparse(node)}`\n\n{inspect.cleandoc(str(after.value.value))}")
    return "\n\n".join(sections)


def text_of(docstring: str | None) -> str:
    """A Google docstring as Markdown: sections become lists."""
    lines: list[str] = []
    section = False
    for line in (docstring or "").splitlines():
        if line in ("Args:", "Attributes:", "Raises:", "Returns:"):
            section = line != "Returns:"
            lines += [f"**{line[:-1]}**", ""]
        elif section and line.startswith("    ") and not line.startswith("     "):
            name, _, rest = line.strip().partition(":")
            lines.append(f"- `{name}`:{rest}")
        elif line.startswith("    "):
            lines.append(f"  {line.strip()}" if section else line.strip())
        else:
            section = section and not line
            lines.append(line)
    return "\n".join(lines)


def head(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The line that begins a function."""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{word} {node.name}({ast.unparse(node.args)}){returns}"


def signature(function: Callable[..., object]) -> str:
    """How a function is called."""
    node = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(node, ast.FunctionDef)
    return head(node).removeprefix("def ")


def attribute_table(name: str, kind: type) -> str:
    """A table of what a class's docstring says of its attributes, one line each."""
    _, _, listed = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    rows = []
    for entry in re.split(r"\n    (?=\w+: )", f"\n{listed}")[1:]:
        field, _, meaning = entry.partition(": ")
        rows.append((code(field), " ".join(meaning.split())))
    return table((name, "meaning"), rows)
