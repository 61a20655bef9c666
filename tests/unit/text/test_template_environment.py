"""The sandbox: what model makers' templates use works, and a template neither escapes, nor runs on, nor fills the memory."""

import re
import time

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from server.text.template_environment import LimitExceeded, RenderLimits, TemplateEnvironment

ENVIRONMENT = TemplateEnvironment()


def render(source, limits=None, **values):
    return ENVIRONMENT.render(ENVIRONMENT.from_string(source), values, limits or RenderLimits())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in [1, 2, 3] %}\n    {% if x == 2 %}{% continue %}{% endif %}\n{{ x }}\n{% endfor %}", "1\n3\n"),
        ("{% for x in [1, 2] %}{{ x }}{% break %}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% set n = namespace(a=1) %}{% for x in [1, 2] %}{% set n.a = n.a + x %}{% endfor %}{{ n.a }}", "4"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ f(2) }}", "[1][2]"),
        ('{{ {"b": "<é>", "a": [1]} | tojson }}', '{"b": "<é>", "a": [1]}'),
        ('{{ {"b": 1, "a": 2} | tojson(indent=1, sort_keys=true) }}', '{\n "a": 2,\n "b": 1\n}'),
        ('{{ "é" | tojson(ensure_ascii=true) }}', '"\\u00e9"'),
        ("{{ 'ab' * 3 }}{{ 2 ** 3 }}{{ [1] * 2 }}", "ababab8[1, 1]"),
    ],
)
def test_what_templates_use(source, text):
    assert render(source) == text


def test_the_date_may_be_asked_for():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_a_template_may_refuse():
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ x.append(1) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ 'a' * 2000000 }}",
        "{{ 2000000 * 'a' }}",
        "{{ [1] * 2000000 }}",
        "{{ 2 ** 65 }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_what_a_template_may_not(source):
    with pytest.raises((SecurityError, jinja2.UndefinedError)):
        render(source, x=[1])


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ self._TemplateReference__context }}"])
def test_python_s_inside_is_not_there(source):
    assert render(source) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
        (
            "{% macro f() %}{% for x in range(9999) %}{{ g() }}{% endfor %}{% endmacro %}"
            "{% macro g() %}{% for x in range(9999) %}{% endfor %}{% endmacro %}{{ f() }}"
        ),
    ],
    ids=["loops", "macros"],
)
def test_time_is_bounded(source):
    began = time.monotonic()
    with pytest.raises(LimitExceeded, match="longer than it may"):
        render(source, RenderLimits(seconds=0.05))
    assert time.monotonic() - began < 5


def test_output_is_bounded():
    with pytest.raises(LimitExceeded, match="more than 1000 characters"):
        render("{% for x in range(999) %}{{ x }}{% endfor %}", RenderLimits(characters=1000))


def test_after_a_limit_the_next_rendering_has_its_own():
    with pytest.raises(LimitExceeded):
        render("{% for x in range(99999) %}{% endfor %}", RenderLimits(seconds=0.0))
    assert render("{% for x in [1] %}{{ x }}{% endfor %}") == "1"
