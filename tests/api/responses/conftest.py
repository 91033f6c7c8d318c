"""A protocol over a store of its own, and a shorthand for what a body asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfra.api.protocol import Call, Received
from deepinfra.api.responses.request import Responses
from deepinfra.api.responses.store import ResponseStore
from deepinfra.core.conversation import Conversation
from deepinfra.core.request import GenerateRequest
from deepinfra.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> ResponseStore:
    return ResponseStore(clock)


@pytest.fixture
def parse(store: ResponseStore, clock: ManualClock) -> Callable[..., Call]:
    """`parse(tenant=..., **fields)`: what a body of these fields asks."""

    def parse(tenant: str = "public", **fields: Any) -> Call:
        received = Received(tenant=tenant, headers={}, now="2026-02-03", max_choices=1)
        return Responses(store, clock).parse({"model": "toy", **fields}, received)

    return parse


@pytest.fixture
def asked(parse: Callable[..., Call]) -> Callable[..., GenerateRequest]:
    def asked(**fields: Any) -> GenerateRequest:
        (request,) = parse(**fields).requests
        return request

    return asked


@pytest.fixture
def talk(asked: Callable[..., GenerateRequest]) -> Callable[..., Conversation]:
    def talk(**fields: Any) -> Conversation:
        conversation = asked(**fields).input
        assert isinstance(conversation, Conversation)
        return conversation

    return talk
