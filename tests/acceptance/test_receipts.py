"""A busy server's receipts, kept by official clients, computed again by `deepinfra replay` in any other arrangement."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from anthropic import Anthropic

if TYPE_CHECKING:
    from tests.acceptance.conftest import Server, Start
    from tests.conftest import Outside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WANTED: dict[str, Any] = {"deepinfra": {"receipt": True}}

INVARIANT = """
[pool]
speculator = { use = "ngram" }

[pool.executor]
use = "torch"
batch_invariant = true
threads = 1
num_blocks = 512
"""

ELSEWHERE = """
[pool.executor]
use = "torch"
batch_invariant = true
threads = 2
num_blocks = 300
block_size = 32
max_step_tokens = 48
process = true
"""

FRUIT = "apple, pear, plum, cherry, " * 6

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}

TOOL = {"name": "get_weather", "description": "The weather of a city", "parameters": SCHEMA}


def _asking(server: Server, claude: Anthropic) -> list[Callable[[], Any]]:
    """Each asks in another way, and gives the object `deepinfra` of its answer."""
    say: list[Any] = [{"role": "user", "content": "Which rivers flow through Paris?"}]
    client = server.client

    def chat(**fields: Any) -> Callable[[], Any]:
        asked: dict[str, Any] = {"temperature": 1.0, "messages": say, "max_tokens": 20, "extra_body": WANTED, **fields}
        return lambda: server.chat(**asked).deepinfra

    def streamed(**fields: Any) -> Callable[[], Any]:
        asked: dict[str, Any] = {"temperature": 1.0, "messages": say, "max_tokens": 20, "extra_body": WANTED, **fields}
        return lambda: [c for c in server.chat(stream=True, **asked) if hasattr(c, "deepinfra")][-1].deepinfra

    def completion() -> Any:
        asked: dict[str, Any] = {"prompt": ["One two three", "Go on: " + FRUIT], "n": 2, "max_tokens": 12}
        return client.completions.create(model="smollm2", **asked, logprobs=2, extra_body=WANTED)

    def response() -> Any:
        asked: dict[str, Any] = {"input": "Name a colour.", "max_output_tokens": 12, "stream": True}
        return list(client.responses.create(model="smollm2", **asked, extra_body=WANTED))[-1]

    def message() -> Any:
        asked: Any = {"messages": say, "max_tokens": 20, "stop_sequences": ["e"]}
        return claude.messages.create(model="smollm2", **asked, extra_body=WANTED)

    tools = [{"type": "function", "function": TOOL}]
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA, "strict": True}}
    return [
        chat(),
        chat(n=3, logprobs=True, top_logprobs=3, seed=5),
        chat(stop=["a", "o"], n=2, logprobs=True),
        chat(temperature=0.0, messages=[{"role": "user", "content": "Go on: " + FRUIT}], max_tokens=40),
        chat(response_format=schema, max_tokens=40),
        chat(tools=tools, tool_choice="required", max_tokens=60),
        chat(extra_body={**WANTED, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}, frequency_penalty=0.5),
        chat(logit_bias={"30": -100}, top_p=0.8, presence_penalty=0.2),
        streamed(),
        streamed(n=2, logprobs=True, temperature=0.4),
        lambda: completion().deepinfra,
        lambda: response().response.deepinfra,
        lambda: message().deepinfra,
    ]


def test_what_a_busy_server_answered_is_computed_again_elsewhere(start: Start, outside: Outside) -> None:
    """Drafts, cached prefixes, a full batch there; one at a time, other blocks, chunks and threads, a process here."""
    log = outside.folder / "log.jsonl"
    with start(outside, INVARIANT) as server, Anthropic(base_url=server.url, api_key="x", max_retries=0) as claude:
        ways = _asking(server, claude)
        with ThreadPoolExecutor(8) as threads:
            told = list(threads.map(lambda ask: ask(), [*ways, *ways, *ways]))
        cached = sum(each["cached_tokens"]["device"] for each in told)
        drafted = server.metric("drafts_accepted_total")
        server.stop()
    assert cached > 0
    assert drafted > 0
    log.write_text("".join(json.dumps({"deepinfra": each}) + "\n" for each in told))
    (outside.folder / "elsewhere.toml").write_text(ELSEWHERE)
    for args in (("-c", "deepinfra.toml", "--concurrency", "16"), ("-c", "elsewhere.toml")):
        done = outside.run("deepinfra", "replay", str(log), "--json", *args, timeout_s=250)
        document = json.loads(done.stdout)
        wrong = [each for each in document["receipts"] if each["verdict"] != "same" or not each["promised"]]
        assert wrong == []
        assert document["counts"] == {"same": len(told)}
        assert done.returncode == 0
    logged = [answer["logprobs"] for each in document["receipts"] for answer in each["answers"]]
    assert logged.count(True) > 20
    assert False not in logged


def test_an_ordinary_answer_is_the_same_alone_and_named_where_torch_computes(start: Start, outside: Outside) -> None:
    ordinary = INVARIANT.replace("batch_invariant = true", 'dtype = "float32"')
    with start(outside, ordinary) as server:
        answer = server.chat("Name three rivers.", temperature=1.0, max_tokens=24, extra_body=WANTED)
        server.stop()
    (outside.folder / "answer.json").write_text(answer.to_json())
    done = outside.run("deepinfra", "replay", "answer.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 receipt: 1 the same; 1 of those the same by no promise" in done.stdout
    (outside.folder / "torch.toml").write_text(ordinary + 'kernels = "torch"\n')
    other = outside.run("deepinfra", "replay", "answer.json", "-c", "torch.toml")
    receipt = answer.deepinfra["receipt"]
    assert other.returncode == (0 if receipt["executors"][0]["path"] == "torch" else 1)
    assert other.returncode == 0 or "cannot be compared: " in other.stdout
    assert other.returncode == 0 or "path differs (recorded 'avx" in other.stdout
