"""Jinja as Hugging Face models use it, in a sandbox with limits; plain, or with provenance.

A template comes from a hub and is not trusted with the machine: no attribute that begins with an underscore, no
mutation of what it is given, bounded loops, calls, numbers and output.

Source: names, filters and whitespace rules are those of transformers' `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import partial, reduce
from string import Formatter
from types import BuiltinMethodType, MethodType
from typing import Any, TypeVar

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from deepinfra.core.digits import json_text
from deepinfra.errors import ModelError, TemplateError
from deepinfra.recipes.chat_template.provenance import Marked, concat, safe, trust_of, trusted

__all__ = ("MarkedTemplate", "PlainTemplate")

T = TypeVar("T")

MAX_STEPS, STEPS_PER_MESSAGE, STEPS_PER_CALL = 1_000_000, 5_000, 10
"""Loop rounds, calls and operators that a rendering may take: a round is 0.1 to 0.5 µs, a call ten times that, so that
a runaway ends within a second. Those of 47 real models take under 60 steps a message."""
MAX_CHARS = 1 << 25
"""Longest text that a template may make at once."""
_WIDE = re.compile(r"\d{5}")
_LEFT: ContextVar[list[int]] = ContextVar("left")
"""Steps that the rendering of this context may still take."""
_IMPURE = ("random", "xmlattr", "urlize", "pprint")


class _Generation(Extension):
    """The `{% generation %}` block of training templates: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict` without the type's attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


class _Namespace(Namespace):
    """A namespace whose names do not begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may name a value `self`
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            _no_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _no_underscore(name)
        super().__setitem__(name, value)


def _no_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json_text(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment both engines share."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,
            cache_size=0,
        )
        self._operators = dict(self.binop_table)
        for name in _IMPURE:
            del self.filters[name]
        self.filters |= {
            "tojson": _tojson,
            "bounded": self._bounded,
            "indent": _narrow(self.filters["indent"]),
            "center": _narrow(self.filters["center"]),
        }
        self.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
        del self.globals["lipsum"]

    def spend(self, steps: int) -> None:
        """Count work of the rendering that runs in this context."""
        left = _LEFT.get(None)
        if left is not None:  # None while constants are folded at compile time
            left[0] -= steps
            if left[0] < 0:
                raise SecurityError("the template does too much work")

    def run(self, function: Callable[[], T], steps: int) -> T:
        """Call with a budget of steps."""
        token = _LEFT.set([steps])
        try:
            return function()
        finally:
            _LEFT.reset(token)

    def _bounded(self, values: Any) -> Any:
        """What every `for` iterates over: counted."""
        if isinstance(values, (list, tuple, dict, str)):
            self.spend(len(values))
            return values
        return self._counted(values)

    def _counted(self, values: Iterable[T]) -> Iterator[T]:
        for value in values:
            self.spend(1)
            yield value

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            counted = nodes.Filter(loop.iter, "bounded", [], [], None, None, lineno=loop.lineno)
            loop.iter = counted.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in the base class, sooner for `loop.first` and its like, which are asked for in every round."""
        return not attr.startswith("_") if type(obj) is LoopContext else super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.spend(STEPS_PER_CALL)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make something huge out of something small."""
        if operator == "+":
            size = len(left) + len(right) if isinstance(left, (str, list)) and isinstance(right, (str, list)) else 0
        elif operator == "*":
            size = _product(left, right)
        elif operator == "**":
            size = left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
        else:
            size = MAX_CHARS + 1 if isinstance(left, str) and _WIDE.search(left) else 0
        self.spend(1 + size // 1024)
        if size > MAX_CHARS:
            raise SecurityError("the template makes something too large")
        return self._operators[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` inside the sandbox, with trust kept for plain fields."""
        if not isinstance(value, (MethodType, BuiltinMethodType)) or value.__name__ not in ("format", "format_map"):
            return None
        template = value.__self__
        if not isinstance(template, str):
            return None
        if value.__name__ == "format_map":
            return lambda mapping: self._format(template, (), mapping)
        return lambda *args, **kwargs: self._format(template, args, kwargs)

    def _format(self, template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        formatter = SandboxedFormatter(self)
        whole = 0 not in trust_of(template)
        parts: list[str] = []
        auto = 0
        for literal, field, spec, conversion in Formatter().parse(template):
            parts.append(trusted(literal) if whole else literal)
            if field is None:
                continue
            if spec and ("{" in spec or _WIDE.search(spec)):
                raise SecurityError("a format has a width that is too large or computed")
            if field == "" or field[0] in ".[":
                field, auto = f"{auto}{field}", auto + 1
            item = formatter.get_field(field, args, kwargs)[0]
            if conversion:
                item = formatter.convert_field(item, conversion)
            parts.append(format(item, spec) if spec else str(item))
        return concat(parts) if isinstance(template, Marked) else "".join(parts)


def _product(left: Any, right: Any) -> int:
    """Size of a product: items of a repeated sequence, bits of a number."""
    if isinstance(left, (str, list, tuple)) or isinstance(right, (str, list, tuple)):
        sequence, times = (left, right) if isinstance(left, (str, list, tuple)) else (right, left)
        return len(sequence) * max(0, times) if isinstance(times, int) else 0
    return left.bit_length() + right.bit_length() if isinstance(left, int) and isinstance(right, int) else 0


def _narrow(filter_: Callable[..., T]) -> Callable[..., T]:
    """A filter that takes a width, which must be small."""

    def narrow(*args: Any, **kwargs: Any) -> T:
        if any(isinstance(value, int) and value > 10_000 for value in (*args, *kwargs.values())):
            raise SecurityError("a filter has a width that is too large")
        return filter_(*args, **kwargs)

    return narrow


class _MarkedCode(CodeGenerator):
    """Writes template text and string constants as trusted strings."""

    environment: _MarkedSandbox

    def _literal(self, text: str) -> str:
        self.environment.literals.append(trusted(text))
        return f"environment.literals[{len(self.environment.literals) - 1}]"

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._literal(node.as_const(frame.eval_ctx)))

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """`a + b + c` as one operation: templates glue every message together this way."""
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        self.write("environment.add(context, (")
        for term in (left, *reversed(terms)):
            self.visit(term, frame)
            self.write(", ")
        self.write("))")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.tilde((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _MarkedSandbox(_Sandbox):
    """The environment with provenance; one per template."""

    code_generator_class = _MarkedCode

    def __init__(self) -> None:
        super().__init__()
        self.literals: list[Marked] = []
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters |= {
            "tojson": lambda *args, **kwargs: Marked(_tojson(*args, **kwargs)),
            "replace": lambda text, old, new, count=None: _mark(text).replace(_mark(old), _mark(new), count or -1),
            "safe": safe,
            "join": jinja2.pass_environment(_join),
        }

    def _concat(self, parts: Iterable[str]) -> Marked:
        return self._limited(concat(parts))

    def _limited(self, text: Marked) -> Marked:
        self.spend(len(text) // 1024)
        if len(text) > MAX_CHARS:
            raise SecurityError("the template makes something too large")
        return text

    def add(self, context: Context, terms: Sequence[Any]) -> Any:
        """The `+` operator, from left to right."""
        for term in terms:
            if type(term) is not Marked:
                return reduce(partial(self.call_binop, context, "+"), terms)
        return self._limited(Marked("".join(terms), b"".join([term._trust for term in terms])))

    def tilde(self, parts: Iterable[Any]) -> Marked:
        """The `~` operator."""
        return self._concat(map(str, parts))


def _mark(value: Any) -> Marked:
    return value if isinstance(value, Marked) else Marked(str(value))


def _join(environment: _Sandbox, values: Iterable[Any], d: str = "", attribute: Any = None) -> Marked:
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    joined = _mark(d).join(map(str, values))
    environment.spend(1 + len(joined) // 1024)
    return joined


def _strftime(now: datetime, mark: bool, pattern: str) -> str:
    text = now.strftime(str.__str__(pattern))
    return trusted(text) if mark and 0 not in trust_of(pattern) else text


class PlainTemplate:
    """A chat template as every other stack renders it; only for comparison in the self-test.

    Raises:
        ModelError: The source is not Jinja, or uses what these templates do not have.
    """

    environment: _Sandbox
    mark = False

    def __init__(self, source: str) -> None:
        self.environment = self._new_environment()
        try:
            self._tree = self.environment.parse(source)
            self._template = self.environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from error

    def _new_environment(self) -> _Sandbox:
        return _Sandbox()

    def render(self, variables: Mapping[str, Any], now: datetime | None = None) -> str:
        """Render; `now` defines `strftime_now`.

        Raises:
            TemplateError: The template refuses the conversation, fails on it, or exceeds its limits.
        """
        extra = {} if now is None else {"strftime_now": partial(_strftime, now, self.mark)}
        try:
            steps = MAX_STEPS + STEPS_PER_MESSAGE * len(variables.get("messages", ()))
            return self.environment.run(lambda: self._render({**variables, **extra}), steps)
        except (SecurityError, jinja2.UndefinedError) as error:
            raise TemplateError(f"The model's chat template fails: {error}", "messages") from error
        except jinja2.TemplateError as error:
            raise TemplateError(str(error.message), "messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise TemplateError(f"The model's chat template fails on this conversation: {why}", "messages") from error

    def _render(self, variables: Mapping[str, Any]) -> str:
        # `Template.render` rewrites tracebacks, at 0.2 ms per refused conversation
        context = self._template.new_context(dict(variables))
        return self.environment.concat(self._template.root_render_func(context))


class MarkedTemplate(PlainTemplate):
    """A chat template whose result says, per character, whether the template wrote it."""

    environment: _MarkedSandbox
    mark = True

    def _new_environment(self) -> _Sandbox:
        return _MarkedSandbox()

    def render(self, variables: Mapping[str, Any], now: datetime | None = None) -> Marked:
        """See `PlainTemplate.render`; strings in `variables` are untrusted unless they are `Marked` otherwise."""
        return _mark(super().render(variables, now))

    def names(self) -> frozenset[str]:
        """Variables that the template reads."""
        return frozenset(jinja2.meta.find_undeclared_variables(self._tree))

    def literals(self) -> frozenset[str]:
        """Its text, string constants and attribute names."""
        found = {node.data for node in self._tree.find_all(nodes.TemplateData)}
        found |= {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        found |= {node.attr for node in self._tree.find_all(nodes.Getattr)}
        return frozenset(found)
