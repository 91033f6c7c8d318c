"""What Claude Code sends, put together from the official client's types and public reports: answered by any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from anthropic import Anthropic
from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming

from deepinfra.engine import Engine, Pool
from deepinfra.executors.torch import TorchExecutor
from deepinfra.recipes import ChatTemplate
from deepinfra.schedulers import Bucketed
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.replay import ReplayExecutor, Script
from deepinfra.testing.served import Served
from deepinfra.testing.textmodel import TrainedTextModel

BETAS = [
    "claude-code-20250219",
    "interleaved-thinking-2025-05-14",
    "context-management-2025-06-27",
    "fine-grained-tool-streaming-2025-05-14",
    "prompt-caching-scope-2026-01-05",
]
COUNTED = ("model", "messages", "system", "tools", "thinking", "betas")
KEPT: Any = {"type": "ephemeral"}
KEPT_LONG: Any = {"type": "ephemeral", "ttl": "1h", "scope": "global"}


def tool(name: str, about: str, required: str = "", **properties: Any) -> Any:
    """A tool as zod writes its schema."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }
    return {"name": name, "description": about, "input_schema": schema, "eager_input_streaming": True}


def string(about: str, **more: Any) -> dict[str, Any]:
    return {"description": about, "type": "string", **more}


def number(about: str, **more: Any) -> dict[str, Any]:
    return {"description": about, "type": "integer", "minimum": 0, "maximum": 9007199254740991, **more}


def flag(about: str) -> dict[str, Any]:
    return {"description": about, "default": False, "type": "boolean"}


PATH = string("Absolute path of the file")
OPTION = {
    "type": "object",
    "properties": {"label": string("Shown to the user"), "description": string("What choosing it means")},
    "required": ["label", "description"],
    "additionalProperties": False,
}
TOOLS = [
    tool(
        "Agent",
        "Starts an agent of its own for a task of several steps. It sees none of this conversation.",
        "description prompt",
        description=string("Three to five words"),
        prompt=string("The whole task"),
        subagent_type=string("Which kind of agent"),
        model={"type": "string", "enum": ["sonnet", "opus", "haiku"]},
        run_in_background=flag("Do not wait for it"),
    ),
    tool(
        "Bash",
        "Runs a command in a shell that keeps its folder. Quote paths with spaces; prefer the other tools for files.",
        "command",
        command=string("The command"),
        timeout=number("Milliseconds, at most 600000", maximum=600000),
        description=string("What it does, in a few words"),
        run_in_background=flag("Go on at once"),
    ),
    tool(
        "Glob", "Finds files by pattern, newest first.", "pattern", pattern=string("As **/*.py"), path=string("Where")
    ),
    tool(
        "Grep",
        "Searches file contents with ripgrep.",
        "pattern",
        pattern=string("A regular expression"),
        path=string("Where; by default here"),
        glob=string("Which files"),
        output_mode=string("What to show", enum=["content", "files_with_matches", "count"]),
        **{"-i": flag("Ignore case"), "-A": number("Lines after"), "-B": number("Lines before")},
        head_limit=number("Only the first so many"),
        multiline=flag("Let . match line breaks"),
    ),
    tool(
        "Read",
        "Reads a file with line numbers, or a picture.",
        "file_path",
        file_path=PATH,
        offset=number("First line"),
        limit={**number("How many lines"), "exclusiveMinimum": 0},
    ),
    tool(
        "Edit",
        "Replaces text in a file that was read before. The old text must occur once.",
        "file_path old_string new_string",
        file_path=PATH,
        old_string=string("What to replace"),
        new_string=string("What with"),
        replace_all=flag("Every occurrence"),
    ),
    tool("Write", "Writes a file.", "file_path content", file_path=PATH, content=string("All of it")),
    tool(
        "NotebookEdit",
        "Changes a cell of a notebook.",
        "notebook_path new_source",
        notebook_path=PATH,
        cell_id=string("Which cell"),
        new_source=string("Its source"),
        cell_type={"type": "string", "enum": ["code", "markdown"]},
        edit_mode={"type": "string", "enum": ["replace", "insert", "delete"]},
    ),
    tool(
        "WebFetch", "Reads a page.", "url prompt", url=string("Where", format="uri"), prompt=string("What to look for")
    ),
    tool(
        "WebSearch",
        "Searches the web.",
        "query",
        query=string("What", minLength=2),
        allowed_domains={"type": "array", "items": {"type": "string"}},
    ),
    tool(
        "TodoWrite",
        "Keeps the list of what is to be done.",
        "todos",
        todos={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    "activeForm": {"type": "string", "minLength": 1},
                },
                "required": ["content", "status", "activeForm"],
                "additionalProperties": False,
            },
        },
    ),
    tool(
        "TaskOutput",
        "Reads what a background task said.",
        "task_id",
        task_id=string("Which"),
        block=flag("Wait for it"),
    ),
    tool("TaskStop", "Ends a background task.", "task_id", task_id=string("Which")),
    tool("Skill", "Follows a skill by name.", "skill", skill=string("Which"), args=string("What for")),
    tool("EnterPlanMode", "Asks to plan first."),
    tool(
        "ExitPlanMode",
        "Shows the plan and asks for leave to begin.",
        allowedPrompts={"type": "array", "items": {"type": "object", "propertyNames": {"type": "string"}}},
    ),
    tool(
        "AskUserQuestion",
        "Asks the user to choose.",
        "questions",
        questions={
            "type": "array",
            "minItems": 1,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "question": string("With a question mark"),
                    "header": string("At most 12 characters"),
                    "options": {"type": "array", "minItems": 2, "maxItems": 4, "items": OPTION},
                    "multiSelect": flag("Several may be chosen"),
                },
                "required": ["question", "header", "options"],
            },
        },
    ),
    {
        "name": "mcp__docs__search",
        "description": "Searches the documentation.",
        "input_schema": {"type": "object", "properties": {"q": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
        "cache_control": KEPT,
    },
]

RULES = "\n".join(
    f"- Rule {number}: {rule}"
    for number, rule in enumerate(
        (
            "Read a file before you change it, and change no more than was asked for.",
            "Say what you found with the path and the line, as in src/app.py:12.",
            "Run the tests that the project has; never say that they pass when you did not run them.",
            "Ask before anything that cannot be taken back: deleting, pushing, sending.",
            "Keep answers short: the user reads them in a terminal.",
            "Call independent tools together and dependent ones one after the other.",
        )
        * 4,
        1,
    )
)


def request(model: str, turns: list[Any], turn: int = 1, **fields: Any) -> dict[str, Any]:
    """The program's request: its billing line differs from turn to turn, everything else stays."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.89.{turn:03x}; cc_entrypoint=cli; cch={turn:05x};"
    environment = "# Environment\nWorking directory: project/app\nPlatform: linux\nGit status: clean\nToday: 2026-04-02"
    return {
        "model": model,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
            {"type": "text", "text": f"You help with software.\n\n{RULES}", "cache_control": KEPT_LONG},
            {"type": "text", "text": environment},
        ],
        "messages": turns,
        "tools": TOOLS,
        "metadata": {"user_id": "user_0f3a_account__session_9b1d"},
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "betas": BETAS,
        **fields,
    }


def said(text: str) -> dict[str, Any]:
    """What the user typed, behind the reminders that the program adds."""
    reminder = "<system-reminder>\nThe project's CLAUDE.md says: use tabs.\n</system-reminder>"
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": reminder},
            {"type": "text", "text": text, "cache_control": KEPT},
        ],
    }


def test_the_request_is_one_that_the_official_types_know() -> None:
    made = {**request("m", [said("hello")]), "stream": True}
    assert len(TOOLS) == 18
    assert set(made) <= MessageCreateParamsStreaming.__annotations__.keys()
    pydantic.TypeAdapter(MessageCreateParamsStreaming).validate_python(made)


class Spoken:
    """A model that cannot reason and whose template knows no tools; it says what it is told to say."""

    def __init__(self, template: str) -> None:
        files = TrainedTextModel(template, ("<|im_start|>", "<|im_end|>"))
        self.tokenizer, self.script = files.tokenizer(), Script()
        eos = files.special_tokens().eos_id or 0
        self.executor = ReplayExecutor(
            self.script, eos=eos, vocab_size=self.tokenizer.get_vocab_size(), max_context=65536
        )
        self.engine = Engine(ChatTemplate(files), Pool(Fcfs(), self.executor), name="small")

    def says(self, text: str) -> None:
        self.script.answers.append(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def asked(self, index: int) -> str:
        text: str = self.tokenizer.decode(self.executor.prompts[index], skip_special_tokens=False)
        return text


@pytest.fixture
def spoken() -> Spoken:
    return Spoken((Path(__file__).parents[2] / "data" / "templates" / "SmolLM2-135M-Instruct.jinja").read_text())


@pytest.fixture
def client(spoken: Spoken) -> Iterator[Anthropic]:
    with Served(spoken.engine) as served:
        with Anthropic(base_url=served.url, auth_token="none", api_key=None, max_retries=0, timeout=60) as client:
            yield client


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 31999}, {"type": "adaptive"}])
def test_a_model_without_tools_or_reasoning_does_a_turn_with_a_tool(
    spoken: Spoken, client: Anthropic, thinking: dict[str, Any]
) -> None:
    command = 'grep -rn "def main" src | head -3'
    spoken.says(
        "I will look.\n<tool_call>\n"
        + json.dumps({"name": "Bash", "arguments": {"command": command, "timeout": 5000}})
        + "\n</tool_call>"
    )
    spoken.says("It is in src/app.py:12.")
    turns = [said("Where is main defined?")]
    with client.beta.messages.stream(**request("small", turns, thinking=thinking)) as stream:
        kinds = [event.type for event in stream if event.type.startswith("content_block_")]
        first = stream.get_final_message()
    assert kinds[0] == "content_block_start"
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert (text.type, call.type) == ("text", "tool_use")
    assert (call.name, call.input) == ("Bash", {"command": command, "timeout": 5000})  # type: ignore[union-attr]

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "src/app.py:12:def main():", "is_error": False}  # type: ignore[union-attr]
    turns += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [{**result, "cache_control": KEPT}]},
    ]
    with client.beta.messages.stream(**request("small", turns, turn=2, thinking=thinking)) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, [block.type for block in last.content]) == ("end_turn", ["text"])
    assert last.content[0].text == "It is in src/app.py:12."  # type: ignore[union-attr]

    asked = spoken.asked(0)
    assert "billing-header" not in asked
    assert all(f'"name": "{each["name"]}"' in asked for each in TOOLS)
    # The next turn's prompt goes on where the first answer ended, so that all of it is read from the cache.
    usage = last.usage
    before = len(spoken.executor.prompts[0])
    assert (usage.cache_read_input_tokens or 0) > before - 32 > 1000
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) == len(
        spoken.executor.prompts[1]
    )


def test_what_the_program_asks_on_the_side_is_answered_too(spoken: Spoken, client: Anthropic) -> None:
    """Its check of the account, the title of a session, and the count of tokens."""
    spoken.says("Hello")
    quota: Any = {"messages": [{"role": "user", "content": "quota"}], "metadata": {"user_id": "user_1"}}
    assert client.beta.messages.create(model="small", max_tokens=1, **quota).stop_reason == "max_tokens"
    spoken.says('{"title": "Find main"}')
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    titled = client.beta.messages.create(
        model="small",
        max_tokens=32000,
        messages=[said("Where is main defined?")],
        system=[{"type": "text", "text": "Write a title of a few words as JSON.", "cache_control": KEPT}],
        extra_body={"temperature": 1},
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": schema}},
        betas=["structured-outputs-2025-12-15"],
        stream=True,
    )
    text = "".join(
        event.delta.text for event in titled if event.type == "content_block_delta" and event.delta.type == "text_delta"
    )
    assert json.loads(text) == {"title": "Find main"}
    made = request("small", [said("hello")])
    assert client.beta.messages.count_tokens(**{name: made[name] for name in COUNTED}).input_tokens > 1000


@pytest.mark.slow
def test_smollm2_answers_it(smollm2_path: Path) -> None:
    model = str(smollm2_path)
    engine = Engine(ChatTemplate(model), Pool(Bucketed(), TorchExecutor(model)), name="smollm2")
    with Served(engine) as served, Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        made = request("smollm2", [said("Say hello.")], extra_body={"temperature": 1})
        with client.beta.messages.stream(**made) as stream:  # the user stops it after a few words
            pieces = [text for text, _ in zip(stream.text_stream, range(4), strict=False)]
        assert "".join(pieces)
        with client.beta.messages.stream(**{**made, "thinking": {"type": "disabled"}, "max_tokens": 24}) as stream:
            message = stream.get_final_message()
        counted = client.beta.messages.count_tokens(**{name: made[name] for name in COUNTED})
    usage = message.usage
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert message.content
    assert (usage.cache_read_input_tokens or 0) > counted.input_tokens - 64 > 3000
    assert (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        == counted.input_tokens
    )
