"""SmolLM2 behind the official client: a conversation that goes on by id, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed
from deepinfra.testing.served import Served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[OpenAI]:
    model = str(smollm2_path)
    engine = Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model)), name="smollm2")
    with Served(engine) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            yield client


def test_three_turns_by_id_are_three_turns_written_out(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_output_tokens": 24}
    by_id, written, previous = [], [], None
    history: list[Any] = []
    for question in ("What is the capital of France?", "And of Italy?", "Which is larger?"):
        answer = client.responses.create(**asked, input=question, previous_response_id=previous)
        previous = answer.id
        history.append({"role": "user", "content": question})
        events = list(client.responses.create(**asked, input=history, stream=True, store=False))
        final = events[-1].response  # type: ignore[union-attr]
        history += final.output
        by_id.append(answer.output_text)
        written.append("".join(event.delta for event in events if event.type == "response.output_text.delta"))
        assert answer.usage is not None
        assert final.usage is not None
        assert answer.usage.input_tokens == final.usage.input_tokens
        assert final.usage.input_tokens_details.cached_tokens > 0
        assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
    assert by_id == written
    assert "Paris" in by_id[0]
