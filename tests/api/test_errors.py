from __future__ import annotations

import pytest

from deepinfra import errors
from deepinfra.api.errors import STATUS, wire_error, wire_error_of
from deepinfra.api.wire import openai_error


def leaves(root: type[errors.DeepinfraError]) -> list[type[errors.DeepinfraError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in leaves(child))]


@pytest.mark.parametrize("kind", leaves(errors.RequestError), ids=lambda kind: kind.__name__)
def test_every_wrong_request_is_a_4xx(kind: type[errors.RequestError]) -> None:
    assert 400 <= STATUS[kind.code][0] < 500


@pytest.mark.parametrize("kind", leaves(errors.EngineError)[1:], ids=lambda kind: kind.__name__)
def test_every_way_an_engine_cannot_serve_has_a_status_of_its_own(kind: type[errors.EngineError]) -> None:
    assert kind.code in STATUS


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (errors.ContextLengthError(10, 5, 12), 400, "context_length_exceeded", "messages"),
        (errors.TemplateError("roles must alternate"), 400, "template-error", "messages"),
        (errors.UnsupportedFieldError("constraint"), 400, "unsupported_parameter", "response_format"),
        (errors.RequestError("no", "temperature"), 400, "invalid_value", "temperature"),
        (errors.ModelUnknownError("x", ["y"]), 404, "model_not_found", "model"),
        (errors.Overloaded("the queue is full", 2.2), 503, "overloaded", None),
        (errors.TenantFullError("as much waits as may", 2.2), 429, "rate_limit_exceeded", None),
        (errors.EngineNotRunningError(), 503, "engine-not-running", None),
        (errors.EngineDrainingError(), 503, "engine-draining", None),
        (errors.InjectionError("a control token came from text"), 500, "injection", None),
        (errors.StepFailed([1], "oom"), 500, "step-failed", None),
        (KeyError("secret"), 500, "internal-error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_has_one_wire_form(error: Exception, status: int, code: str, param: str | None) -> None:
    wire = wire_error_of(error, {"input": "messages", "constraint": "response_format"})
    assert (wire.status, wire.code, wire.param) == (status, code, param)
    told, body = openai_error(wire, "req_1")
    assert told == status
    assert set(body) == {"error"}
    assert isinstance(body["error"], dict)
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_a_renamed_field_is_renamed_in_the_sentence_too() -> None:
    wire = wire_error_of(errors.UnsupportedFieldError("constraint"), {"constraint": "response_format"})
    assert wire.message == "'response_format' is not supported by this server"


def test_paths_are_spelled_as_openai_spells_them() -> None:
    wire = wire_error_of(errors.UnsupportedFieldError("tools[12].strict"), {})
    assert (wire.param, wire.message) == ("tools.12.strict", "'tools.12.strict' is not supported by this server")


def test_a_foreign_exception_is_not_described_to_the_client() -> None:
    assert "secret" not in wire_error_of(KeyError("secret"), {}).message


def test_overload_says_in_whole_seconds_when_to_come_back() -> None:
    headers = dict(wire_error_of(errors.Overloaded("full", 2.2), {}).headers())
    assert headers[b"retry-after"] == b"3"
    assert dict(wire_error("overloaded", "shed").headers())[b"retry-after"] == b"1"


def test_other_errors_do_not_ask_to_come_back() -> None:
    assert b"retry-after" not in dict(wire_error("invalid-request", "no").headers())


def test_what_quotes_a_client_is_cut() -> None:
    wire = wire_error("invalid-request", "x" * 10_000, param="y" * 10_000)
    assert wire.param is not None
    assert max(len(wire.message), len(wire.param)) <= 2000
