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
from deepinfra.recipes.chat_template.limits import (
    TEXT_METHODS,
    UNBOUNDED,
    check_method,
    compares,
    limited,
    metered,
    product,
    size_of,
)
from deepinfra.recipes.chat_template.provenance import Marked, concat, safe, trust_of, trusted

__all__ = ("MarkedTemplate", "PlainTemplate")

T = TypeVar("T")

MAX_STEPS, STEPS_PER_MESSAGE, STEPS_PER_CALL = 1_000_000, 5_000, 10
"""Loop rounds, calls and operators that a rendering may take: a round is 0.1 to 0.5 µs, a call ten times that, so that
a runaway ends within a second. Those of 47 real models take under 60 steps a message."""
_WIDE = re.compile(r"\d{5}")
_LEFT: ContextVar[list[int]] = ContextVar("left")
"""Steps that the rendering of this context may still take."""
_STAR = re.compile(r"%[^a-zA-Z%]*\*")


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


def _compared_to_constants(node: nodes.Compare) -> bool:
    """With a constant, or a list of them: as long as that, whatever the other side is."""
    inside = [
        each
        for operand in node.ops
        for each in (operand.expr.items if isinstance(operand.expr, nodes.List) else [operand.expr])
    ]
    return all(isinstance(each, nodes.Const) for each in inside)


class _Code(CodeGenerator):
    """Writes values through `_Sandbox.shown`."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.shown(")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.tilde((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment both engines share."""

    code_generator_class = _Code
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
        for name in UNBOUNDED:
            del self.filters[name]
        self._meter({"tojson": _tojson, "format": self._percent})
        self.filters |= {"bounded": self._bounded, "weighed": self._weighed, "sized": self._sized}
        for name in filter(compares, self.tests):
            test = self.tests[name]
            self.tests[name] = metered(name, test, self.spend, self._counted)
        self.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
        del self.globals["lipsum"]

    def spend(self, steps: int) -> None:
        """Count work of the rendering that runs in this context."""
        left = _LEFT.get(None)
        if left is not None:  # None while constants are folded at compile time
            left[0] -= steps
            if left[0] < 0:
                raise SecurityError("the template does too much work")

    def _meter(self, own: Mapping[str, Callable[..., Any]]) -> None:
        """Let all filters pay for what they do, `own` in place of Jinja's."""
        self.filters |= own
        for name, filter_ in self.filters.items():
            self.filters[name] = metered(name, filter_, self.spend, self._counted)

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

    def _weighed(self, value: Any) -> Any:
        """What is written, compared or put into a list: it pays for everything inside it."""
        if isinstance(value, str):
            if len(value) > 1024:
                self.spend(len(value) // 1024)
        elif isinstance(value, (list, tuple, dict, _Namespace)):
            self.spend(1 + limited(size_of(value)) // 1024)
        return value

    def _sized(self, value: Any) -> Any:
        """What a slice is taken of: it pays for its length."""
        if isinstance(value, (str, list, tuple)):
            self.spend(1 + len(value) // 1024)
        return value

    def _percent(self, value: str, *args: Any, **kwargs: Any) -> Any:
        """The filter `format`."""
        return self._percented(str(value), kwargs or args)

    def _percented(self, text: str, values: Any) -> Any:
        if _WIDE.search(text) or _STAR.search(text):
            raise SecurityError("a format has a width that is too large or computed")
        self._weighed(values)
        return text % values

    def shown(self, value: Any) -> str:
        """What is written of a value."""
        return value if type(value) is Marked else str(self._weighed(value))

    def tilde(self, parts: Iterable[Any]) -> str:
        """The `~` operator."""
        joined = self.concat(list(map(self.shown, parts)))
        limited(len(joined))
        return joined

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        def through(name: str, node: Any) -> Any:
            if isinstance(node, nodes.Const):
                return node
            return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno).set_environment(self)

        for node in list(
            source.find_all((nodes.For, nodes.Compare, nodes.Getitem, nodes.List, nodes.Tuple, nodes.Pair))
        ):
            if isinstance(node, nodes.For):
                node.iter = through("bounded", node.iter)
            elif isinstance(node, nodes.Pair):
                node.key, node.value = through("weighed", node.key), through("weighed", node.value)
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
                node.node = through("sized", node.node)
            elif isinstance(node, nodes.List) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
                node.items = [through("weighed", each) for each in node.items]
            elif isinstance(node, nodes.Compare) and not _compared_to_constants(node):
                sides: list[Any] = [node, *node.ops]
                for side in sides:
                    side.expr = through("weighed", side.expr)
        return super()._generate(source, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in the base class, sooner for `loop.first` and its like, which are asked for in every round."""
        if isinstance(obj, (str, bytes, int, float)):
            return isinstance(obj, str) and attr in TEXT_METHODS
        return not attr.startswith("_") if type(obj) is LoopContext else super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.spend(STEPS_PER_CALL)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = __obj.__name__
            if name == "join" and len(args) == 1 and not isinstance(args[0], (str, list, tuple)):
                args = (list(__self._bounded(args[0])),)
            __self.spend(check_method(owner, name, args))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make something huge out of something small."""
        if operator == "%" and isinstance(left, str):
            return self._percented(left, right)
        size = product(operator, left, right)
        self.spend(1 + size // 1024)
        limited(size)
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


class _MarkedCode(_Code):
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


class _MarkedSandbox(_Sandbox):
    """The environment with provenance; one per template."""

    code_generator_class = _MarkedCode

    def __init__(self) -> None:
        super().__init__()
        self.literals: list[Marked] = []
        self.concat = self._concat  # type: ignore[method-assign]
        own = {
            "tojson": lambda *args, **kwargs: Marked(_tojson(*args, **kwargs)),
            "replace": lambda text, old, new, count=None: _mark(text).replace(_mark(old), _mark(new), count or -1),
            "safe": safe,
            "join": jinja2.pass_environment(_join),
        }
        self.filters |= {name: metered(name, filter_, self.spend, self._counted) for name, filter_ in own.items()}

    def _concat(self, parts: Iterable[str]) -> Marked:
        return self._limited(concat(parts))

    def _limited(self, text: Marked) -> Marked:
        self.spend(limited(len(text)) // 1024)
        return text

    def add(self, context: Context, terms: Sequence[Any]) -> Any:
        """The `+` operator, from left to right."""
        for term in terms:
            if type(term) is not Marked:
                return reduce(partial(self.call_binop, context, "+"), terms)
        return self._limited(Marked("".join(terms), b"".join([term._trust for term in terms])))


def _mark(value: Any) -> Marked:
    return value if isinstance(value, Marked) else Marked(str(value))


def _join(environment: _Sandbox, values: Iterable[Any], d: str = "", attribute: Any = None) -> Marked:
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    parts = [str(value) for value in values]
    environment.spend(1 + limited(sum(map(len, parts)) + len(d) * len(parts)) // 1024)
    return _mark(d).join(parts)


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
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
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
