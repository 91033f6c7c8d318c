"""What is served, as both official clients read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from deepinfra.api.app import asgi
from deepinfra.engine import Engine, Pool
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.client import Client
from deepinfra.testing.served import Served
from deepinfra.testing.tiny import TinyRecipe

NAMES = ("one", "org/two", "three", "four")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor(num_blocks=256)))
    with Served(dict.fromkeys(NAMES, engine)) as served:
        yield served


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_lists_and_retrieves_models(gpt: OpenAI) -> None:
    models = list(gpt.models.list())
    assert [model.id for model in models] == list(NAMES)
    for model in models:
        type(model).model_validate(model.model_dump(), strict=True)
        assert gpt.models.retrieve(model.id) == model
        assert (model.object, model.owned_by) == ("model", "deepinfra")


def test_anthropics_client_lists_and_retrieves_models(claude: Anthropic, gpt: OpenAI) -> None:
    models = list(claude.models.list())
    assert [model.id for model in models] == list(NAMES)
    for model in models:
        type(model).model_validate(model.model_dump())
        assert claude.models.retrieve(model.id) == model
        assert (model.type, model.display_name, model.lifecycle) == ("model", model.id, "active")
        assert model.max_input_tokens == 1024
        assert model.created_at.timestamp() == gpt.models.retrieve(model.id).created
    assert [model.id for model in claude.beta.models.list()] == list(NAMES)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_pages_are_the_list(claude: Anthropic, limit: int) -> None:
    first = claude.models.list(limit=limit)
    assert first.has_more == (limit < len(NAMES))
    assert [model.id for model in first] == list(NAMES)  # the client asks for one page after the other
    last = claude.models.list(limit=limit, before_id="four")
    assert (last.first_id, last.last_id) == (NAMES[max(0, 3 - limit)], "three")
    backwards = [page.data for page in last.iter_pages()]
    assert sorted(model.id for page in backwards for model in page) == sorted(NAMES[:3])


def test_no_model_is_retired(claude: Anthropic) -> None:
    assert list(claude.models.list(lifecycle=["retired"])) == []
    assert len(list(claude.models.list(lifecycle=["active", "retired"]))) == len(NAMES)


@pytest.mark.parametrize(
    ("asked", "name"), [({"limit": 0}, "limit"), ({"limit": 1001}, "limit"), ({"after_id": "x"}, "after_id")]
)
def test_a_wrong_parameter_is_named(claude: Anthropic, asked: dict[str, Any], name: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=f"'{name}'") as caught:
        claude.models.list(**asked)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_told_in_the_words_of_the_client(claude: Anthropic, gpt: OpenAI) -> None:
    with pytest.raises(anthropic.NotFoundError) as told:
        claude.models.retrieve("other")
    body: Any = told.value.body
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == told.value.request_id
    with pytest.raises(openai.NotFoundError) as caught:
        gpt.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_how_much_fits_is_unknown_before_the_engine_runs(engine: Engine) -> None:
    status, model = await Client(asgi(engine)).get("/v1/models/toy")
    assert (status, model["max_tokens"]) == (200, None)
