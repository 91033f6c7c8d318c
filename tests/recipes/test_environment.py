from __future__ import annotations

from datetime import datetime

import pytest

from deepinfra.errors import ModelError, TemplateError
from deepinfra.recipes.chat_template.environment import MarkedTemplate, PlainTemplate
from deepinfra.recipes.chat_template.provenance import Marked, trust_of, trusted


def shown(source: str, **variables: object) -> str:
    """The rendered text with foreign characters as dots; checked to be what plain Jinja renders."""
    text = MarkedTemplate(source).render(variables)
    assert str.__str__(text) == PlainTemplate(source).render(variables)
    return "".join(char if trust else "." for char, trust in zip(str.__str__(text), trust_of(text), strict=True))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<|a|>{{ x }}<|b|>", "<|a|>..<|b|>"),
        ("{{ '<|a|>' + x + '<|b|>' }}", "<|a|>..<|b|>"),
        ("{{ '<|a|>' ~ x ~ 1 ~ '<|b|>' }}", "<|a|>...<|b|>"),
        ("{{ 'a' ~ 'b' }}{{ 'c' 'd' }}", "abcd"),
        ("{% macro m(t) %}<{{ t }}>{% endmacro %}{{ m(x) }}{{ m('y') }}", "<..><y>"),
        ("{% set s %}<{{ x }}>{% endset %}{{ s }}", "<..>"),
        ("{% filter upper %}<{{ x }}a>{% endfilter %}", "<..A>"),
        ("{{ [x, '<b>'] | join('|') }}", "..|<b>"),
        ("{{ [{'k': x}, {'k': '<b>'}] | join('|', attribute='k') }}", "..|<b>"),
        ("{{ ('<' + x + '>') | replace('<', '[') | trim }}", "[..>"),
        ("{{ '<{}|{}>'.format(x, 'b') }}", "<..|b>"),
        ("{{ '<{0.k}>'.format(d) }}", "<..>"),
        ("{{ '<%s>' % x }}{{ '<%s>' | format(x) }}", "<..><..>"),
        ("{{ d | tojson }}", "..........."),
        ("{{ '<|a|>' | tojson }}", '"<|a|>"'),
        ("{{ x | string | safe }}{{ ('<' ~ x) | safe }}", "..<.."),
        ("{% for c in '<' + x %}{{ c }}{% endfor %}", "<.."),
        ("{% for k, v in d.items() %}{{ k }}={{ v }}{% if not loop.last %},{% endif %}{% endfor %}", ".=.."),
        ("{% set n = namespace(t='<') %}{% set n.t = n.t + x %}{{ n.t }}", "<.."),
        ("{{ x if x else '<' }}{{ '' or '<' }}{{ u | default('<') }}", "..<<"),
        ("{% generation %}<{{ x }}{% endgeneration %}", "<.."),
        ("{% for i in range(3) %}{% if i == 1 %}{% break %}{% endif %}<{% endfor %}", "<"),
        ("{{ x.split('n')[0] + ('<' + x).split('n')[0] }}", ".<."),
    ],
)
def test_only_what_the_template_wrote_is_trusted(source: str, expected: str) -> None:
    assert shown(source, x=Marked("in"), d={Marked("k"): Marked("in")}) == expected


def test_a_constant_list_rendered_as_json_is_the_templates_own() -> None:
    assert shown("{{ ['a'] | tojson }}") == '["a"]'


def test_the_date_is_trusted_where_the_template_wrote_its_pattern() -> None:
    template = MarkedTemplate("{{ strftime_now('%Y') }}{{ strftime_now(x) }}")
    text = template.render({"x": Marked("%m")}, datetime(2025, 1, 15))
    assert text == "202501"
    assert trust_of(text) == b"\1\1\1\1\0\0"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ m.append(1) }}",
        "{% set n = namespace(_a=1) %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ x | center(1000000000) }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% macro m(i) %}{% if i %}{{ m(i - 1) }}{{ m(i - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a'.ljust(10 ** 11) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ (5).to_bytes(10 ** 10, 'big') }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ ('\n' * 10 ** 7) | indent(10000) }}",
        "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 7).join(range(1000) | map('string')) }}",
        "{{ range(1000) | join('a' * 10 ** 7) }}",
        "{{ [1] | batch(10 ** 10, 'x') | list }}",
        "{{ [1] | slice(10 ** 10) | list }}",
        "{{ [[1]] | tojson(indent=10 ** 10) }}",
        "{{ (3 ** 16000000 // 3 ** 8000000) is odd }}",
        "{{ ([[0] * 1000] * 30000) | sum(start=[]) }}",
        "{{ ('f' * 10 ** 7) | int(base=16) }}",
        "{% set t = 'a' * 10 ** 7 %}{% for i in range(90000) %}{% if t.upper() == t.lower() %}{% endif %}{% endfor %}",
        "{% set t = 'a' * 10 ** 7 %}{% for i in range(90000) %}{% set u = t[1:] %}{% endfor %}",
        "{% set t = 'a ' * 10 ** 7 %}{{ t.split(' ') | length }}",
        "{% set t = 'a' * 10 ** 7 %}{{ t | list | length }}",
        *(
            "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = TWICE %}{% endfor %}".replace(
                "TWICE", twice
            )
            + use
            for twice in ("[n.x, n.x]", "(n.x, n.x)", "{'a': n.x, 'b': n.x}", "namespace(a=n.x, b=n.x)", "[n.x] * 2")
            for use in ("{{ n.x }}", "{{ n.x ~ '' }}", "{{ [n.x] | tojson }}", "{{ n.x == n.x }}", "{{ [n.x] }}")
        ),
        "{{ raise_exception('no') }}",
        "{{ u.v }}",
        "{{ 1 / 0 }}",
        "{{ u | tojson }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_run_away(source: str) -> None:
    with pytest.raises(TemplateError):
        MarkedTemplate(source).render({"x": Marked("in"), "m": [1]})


@pytest.mark.parametrize("source", ["x._trust", "x['_trust']", "x | attr('_trust')", "'{0.__class__}'.format(x)"])
def test_names_that_begin_with_an_underscore_are_undefined(source: str) -> None:
    assert MarkedTemplate(f"{{{{ {source} }}}}").render({"x": Marked("in")}) == ""


def test_the_templates_own_message_reaches_the_caller() -> None:
    with pytest.raises(TemplateError, match=r"^Roles must alternate!$") as caught:
        MarkedTemplate("{{ raise_exception('Roles must alternate!') }}").render({})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x | nosuchfilter }}",
        "{% for x in y %}",
        "{{ [1] | random }}",
        "{{ x | striptags }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ 1" + "0" * 5000 + " }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
    ids=lambda source: source[:20],
)
def test_a_template_that_is_no_template_is_an_error_of_the_model(source: str) -> None:
    with pytest.raises(ModelError):
        MarkedTemplate(source)


def test_a_template_tells_what_it_reads() -> None:
    template = MarkedTemplate("{% for m in messages %}{% if m.role == 'developer' %}{{ tools }}{% endif %}{% endfor %}")
    assert template.names() == {"messages", "tools"}
    assert {"developer", "role"} <= template.literals()


def test_trust_given_from_outside_is_kept() -> None:
    assert trust_of(MarkedTemplate("{{ bos }}").render({"bos": trusted("<s>")})) == b"\1\1\1"
