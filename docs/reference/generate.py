"""Writes the pages of this folder from the code: `python docs/reference/generate.py`; tests/docs checks they are fresh.

A page is a heading, a paragraph written here, and tables read from the code. What cannot be read from the code (what a
request field means) is in MEANINGS, and a field that is missing there is an error.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args, get_origin

import anyio
import typer
from markdown_of import accepts, attribute_table, class_section, code, default, signature, table, text_of
from pydantic import BaseModel

import deepinfra.interfaces
from deepinfra import Engine, Pool, asgi, errors, hookspecs
from deepinfra.api import metrics
from deepinfra.api.chat.messages import AssistantMessage, PlainMessage, ToolMessage, UserMessage
from deepinfra.api.chat.request import ChatRequest
from deepinfra.api.completions.request import DEFAULT_MAX_TOKENS, CompletionRequest
from deepinfra.api.endpoint import RECEIPT
from deepinfra.api.errors import STATUS
from deepinfra.api.messages.request import MessagesRequest
from deepinfra.api.responses.request import ResponsesRequest
from deepinfra.api.retention import HEADER
from deepinfra.api.wire import RequestFields
from deepinfra.cli import app
from deepinfra.config.keys import KeyEntry
from deepinfra.config.settings import PartChoice, ServerSettings
from deepinfra.config.sources import ENV_PREFIX
from deepinfra.core.kv import Traffic
from deepinfra.engine.receipts import VERSION, Answered, Asked, ExecutorFacts, Receipt
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces import Executor, ExpertPlacer, KVStore, Recipe, Scheduler, Speculator
from deepinfra.registry import KINDS, load_plugins
from deepinfra.schedulers import Fcfs
from deepinfra.testing import TinyRecipe

__all__ = ("PAGES", "main")

HERE = Path(__file__).parent

INTERFACES = {
    "recipe": Recipe,
    "scheduler": Scheduler,
    "kvstore": KVStore,
    "executor": Executor,
    "speculator": Speculator,
    "placer": ExpertPlacer,
}

MEANINGS = {
    "model": "The name that `/v1/models` lists.",
    "messages": "The conversation; see [messages](#messages).",
    "prompt": "Text, token ids, or an array of several of either; text is continued as it stands, without a template.",
    "n": "Independent answers per prompt.",
    "best_of": "Only equal to `n`.",
    "seed": "The same seed, prompt and weights give the same tokens.",
    "stop": "Strings that end an answer; not returned.",
    "stream": "Server-sent events instead of one object.",
    "stream_options": "`include_usage` adds a last chunk with usage; `include_obfuscation` may only be false.",
    "max_tokens": "Most tokens of an answer.",
    "max_completion_tokens": "The same, by its newer name.",
    "temperature": "0 always takes the likeliest token.",
    "top_p": "Keep the smallest set of tokens whose probability reaches it.",
    "top_k": "Keep the k likeliest; 0 or -1 keeps all.",
    "min_p": "Drop tokens below this share of the likeliest one's probability.",
    "presence_penalty": "Subtracted once from logits of tokens already in the output.",
    "frequency_penalty": "Subtracted once per occurrence in the output.",
    "repetition_penalty": "Divides or multiplies logits of every token of prompt and output.",
    "logit_bias": "Token ids to what is added to their logits.",
    "logprobs": "Return the logarithm of each chosen token's probability.",
    "top_logprobs": "And that of so many alternatives.",
    "deepinfra": "What only this server can be asked for: `receipt`; see [receipts](#receipts).",
    "ignore_eos": "Go on past the model's own end; for benchmarks.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether it must, may or must not call one.",
    "parallel_tool_calls": "Whether it may call several at once.",
    "response_format": "What the answer must match: `text`, `json_object` or `json_schema`.",
    "stop_token_ids": "Tokens that end an answer besides the model's own.",
    "priority": "Lower ones run sooner, as in vLLM; who waits long enough overtakes everybody. `fcfs` knows none.",
    "structured_outputs": "One of `json`, `json_object`, `regex`, `choice`, `grammar` (Lark), as in vLLM.",
    "chat_template_kwargs": "Further names for the model's chat template; one that it does not read is refused.",
    "input": "A text, or items: messages, calls and their outputs, reasoning.",
    "instructions": "A system message before the input, for this request alone.",
    "previous_response_id": "Go on after a stored response of the same tenant.",
    "max_output_tokens": "Most tokens of an answer.",
    "max_tool_calls": "Accepted: built-in tools, which it limits, are refused.",
    "reasoning": "`effort`, told to the template; reasoning is returned whole, never summarised.",
    "text": "`format`: what the answer must match.",
    "include": "`message.output_text.logprobs` and `reasoning.encrypted_content` have an effect.",
    "store": "Keep the response for later requests; by default it is.",
    "metadata": "Given back with the response.",
    "prompt_cache_key": "Given back; every prefix is cached.",
    "prompt_cache_options": "`ttl` is the least time for which the prompt's KV is kept.",
    "safety_identifier": "Given back.",
    "user": "Given back.",
    "system": "Text, or blocks of text, before the messages.",
    "stop_sequences": "Strings that end an answer; not returned.",
    "output_config": "`effort`, told to the template, and `format`: a JSON Schema.",
    "cache_control": "`ttl` is the least time for which the prompt's KV is kept; every prefix is cached.",
    "context_management": "Only what clears nothing.",
    "reasoning_effort": "Told to the template; refused by a model that has none.",
    "thinking": "Whether to reason at all, as DeepSeek and Anthropic spell it; stronger than an effort.",
    "prompt_cache_retention": "`24h` keeps the prompt's KV a day, `in_memory` never writes it to a disk.",
    "cache_salt": "Share the prompt's KV with requests of the same tenant and salt, and with no others; as in vLLM.",
}

BODIES: Mapping[str, type[RequestFields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}

OTHER_CODES = {
    "not-found": "No such path.",
    "method-not-allowed": "The path is there, the method is not.",
    "cancelled": "The server stopped before the answer was complete.",
    "internal-error": "A mistake of the server's; its log has the details.",
}


def meaning(error: type[errors.DeepinfraError]) -> str:
    """The first sentence of an error's docstring."""
    text = " ".join((inspect.getdoc(error) or "").partition("\n\n")[0].split())
    text = text.removeprefix("Raised when ")
    return text[:1].upper() + text[1:]


def about(part: type) -> str:
    """What a kind of part is, from the first line of its module."""
    text = (inspect.getmodule(part).__doc__ or "").partition("\n")[0].partition(": ")[2]
    return text[:1].upper() + text[1:]


# -- pages ----------------------------------------------------------------------------------------


def settings() -> str:
    """Settings."""

    def rows(model: type[BaseModel], at: tuple[str, ...]) -> Iterator[Sequence[object]]:
        for name, info in model.model_fields.items():
            key = (*at, name)
            inner = info.annotation
            if isinstance(inner, type) and issubclass(inner, PartChoice):
                for sub, subinfo in inner.model_fields.items():
                    chosen = code(f'"{info.default.use}"') if sub == "use" else default(subinfo)
                    about = f"{info.description}: the part's name" if sub == "use" else subinfo.description
                    yield code(".".join((*key, sub))), chosen, about, code(environment((*key, sub)))
            elif isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from rows(inner, key)
            elif key[0] in ("prefill", "decode"):
                yield code(f"[[{name}]]"), "none", info.description, ""
            else:
                yield code(".".join(key)), default(info), info.description, code(environment(key))

    def environment(key: tuple[str, ...]) -> str:
        return ENV_PREFIX + "__".join(key).upper()

    return f"""# Settings

Keys of `deepinfra.toml`. The environment is stronger than the file, the command line stronger than both; an unknown
key is refused. Beside `use`, a part's table holds the part's own keys: see [parts](parts.md). `[[prefill]]` and
`[[decode]]` are tables like `[pool]`, one for each pool; their store is `none` unless named.

{table(("key", "default", "meaning", "environment"), list(rows(ServerSettings, ())))}

`deepinfra explain` prints all of them as they are in effect, and where each came from.
"""


def parts() -> str:
    """Parts."""
    registry = load_plugins()
    sections = []
    for kind in KINDS:
        interface = INTERFACES[kind]
        sections.append(f"## {kind}\n\n{about(interface)} [Interface](interfaces.md#{interface.__name__.lower()}).")
        for name, entry in sorted(registry.of_kind(kind).items()):
            if entry.origin.distribution != "deepinfra-serve":
                continue
            fields = []
            for key, info in entry.options.model_fields.items():
                fields.append((code(key), accepts(info), default(info), info.description))
                if get_origin(info.annotation) is Mapping:  # a table of named tables
                    (inner,) = [t for t in get_args(info.annotation) if isinstance(t, type)]
                    for sub, subinfo in inner.model_fields.items():
                        name_of = code(f"{key}.NAME.{sub}")
                        fields.append((name_of, accepts(subinfo), default(subinfo), subinfo.description))
            keys = table(("key", "takes", "default", "meaning"), fields) if fields else "No keys."
            sections.append(f"### {kind} `{name}`\n\n{keys}")
    body = "\n\n".join(sections)
    return f"""# Built-in parts

What `use = "…"` can name without a plug-in, and the keys that may stand beside it. `"none"` means without this part.
A key `model` is filled in with the server's model, and a store's `path` with the server's KV folder.

{body}
"""


def cli() -> str:
    """Commands."""
    command = typer.main.get_command(app)

    def walk(node: typing.Any, path: str) -> Iterator[str]:
        if children := getattr(node, "commands", None):
            for name, child in children.items():
                yield from walk(child, f"{path} {name}")
            return
        yield f"## `{path}`\n\n{inspect.cleandoc(node.help)}\n\n{options(node)}"

    def options(node: typing.Any) -> str:
        rows = []
        for option in node.params:
            name = ", ".join(option.opts) if option.opts[0].startswith("-") else option.metavar or option.name.upper()
            value = "" if getattr(option, "is_flag", False) or not option.opts[0].startswith("-") else option.metavar
            given = option.default
            rows.append(
                (
                    code(f"{name} {value}" if value else name),
                    "required" if option.required else "" if given in (None, False) else code(given),
                    option.help,
                )
            )
        return table(("option", "default", "meaning"), rows) if rows else "No options."

    body = "\n\n".join(walk(command, "deepinfra"))
    return f"""# Commands

Exit status: 0, or 1 with one sentence for what went wrong, or 2 for wrong usage. Before the command:

{options(command)}

{body}
"""


def http_api() -> str:
    """HTTP API."""
    application = asgi(_engine())
    paths = [
        (code(route.path), ", ".join(sorted(route.methods - {"HEAD"})))  # type: ignore[attr-defined]
        for route in application.routes
    ]
    sections = []
    for path, model in BODIES.items():
        honoured = [(code(name), accepts(info), MEANINGS[name]) for name, info in model.model_fields.items()]
        refused = [
            (code(name), " or ".join(code(json.dumps(value)) for value in neutral) or "nothing (`null` only)")
            for name, neutral in model.NEUTRAL.items()
        ]
        sections.append(
            f"""## `POST {path}`

### Honoured by {path}

{table(("field", "takes", "meaning"), honoured)}

### Accepted and ignored by {path}

They have no effect on the answer: bookkeeping of the caller, or hints for speed.
{", ".join(code(name) for name in sorted(model.IGNORED)) or "There are none"}.

### Refused by {path}

Every unknown field, and these unless they say what happens anyway:

{table(("field", "may be"), refused)}"""
        )
    body = "\n\n".join(sections)
    return f"""# HTTP API

Three protocols of OpenAI and one of Anthropic. A field that has an effect is honoured or refused with a 400 that
names it; see [errors](errors.md). Bodies have at most `api.max_body_nbytes` bytes, 64 levels and 100,000 objects and
arrays.

{table(("path", "method"), paths)}

`/health` answers 503 only if an engine cannot recover, `/ready` whenever requests should go elsewhere.

## Keys

A server with keys ([settings](settings.md): `api.keys_file`, `api_keys`) asks for one in `authorization: Bearer KEY` or
`x-api-key: KEY`, for everything but `/health`, `/ready` and `/metrics`, plug-ins' routes included; without a known one
the answer is 401. A file has a table for each key:

| key of `[[key]]` | meaning |
| --- | --- |
{_keys()}

Tenants share no stored response, and no cached prompt but of prefixes that are declared public ([how
to](../howto/kv-cache.md#sharing-between-tenants)). A key beyond its limits gets 429 with `retry-after`; a minute's
worth of requests may come at once after a minute's rest. The access log has a key's name and never the key.

## Where OpenAI and DeepSeek differ

`api.dialect` decides for `/v1/chat/completions` and `/v1/completions`: with `deepseek` a wrong parameter is refused
with 422 instead of 400, and a call that `tool_choice` asked for by name ends with `tool_calls` instead of `stop`.

{body}

## How long KV is kept

The first of these that says something decides: the key's `retention`; the header `{HEADER}`
({_classes()}); the body's `prompt_cache_retention`, `prompt_cache_options.ttl` or
`cache_control.ttl`; the kind of request. Requests with tools are `agent`, other conversations `chat`, completions
`default`; the store's options say how long each lives. See [how to](../howto/kv-cache.md#how-long-kv-is-kept).

## Receipts

`"deepinfra": {{"receipt": true}}` in a body, or the header `{RECEIPT}: 1`, adds `deepinfra.receipt` to the
answer: what decided its tokens. `api.receipts` can refuse that to everybody, or give it with every answer. In a stream
it is in the event that carries `deepinfra`. [How to](../howto/receipts.md) compute an answer again from it.

{_receipt_tables()}

Fields that have their default are left out. A receipt of version {VERSION} takes about 1,000 bytes, six more for each
token of prompt and answer, and as many as `constraint` has. It names no caller: no key, tenant, salt, path or header is
in it.

## Messages

{_messages()}

A part is `{{"type": "text", "text": "…"}}`; in a user's message also `image_url` with a `data:` URL, for models that
take images: this server fetches nothing. Audio and files are refused. Calls are answered by the tool messages right
behind them; only those of a last message may be open.

## Differences from OpenAI

- `/v1/completions` generates {DEFAULT_MAX_TOKENS} tokens unless told otherwise, `/v1/chat/completions` as many as fit.
- `/v1/responses` keeps answers in memory, `api.stored_ttl_s` after their last use: a restart forgets them.
- Answers carry one more object, `deepinfra`: `seed`, which reproduces the answer, `cached_tokens` by tier, and
  `cached_age_s`: how long ago, in seconds, the oldest record of a tier's was saved.
- The header `x-deepinfra-deadline-s: 20` gives an answer up after 20 seconds: 504, or an error in mid-stream.
- A full server answers 503 with `retry-after`; 429 is a limit of the caller's own.
- The header `x-deepinfra-explain: 1` adds `deepinfra.explain`: why no more of the first prompt was found in the cache;
  see [how to](../howto/kv-cache.md#why-did-it-miss).
- `usage` also has `prompt_cache_hit_tokens` and `prompt_cache_miss_tokens`, as DeepSeek's does.
- Reasoning is `reasoning_content`, in answers and in messages given back, as DeepSeek's is.

## Differences from Anthropic

- `thinking` of type `enabled` is leave to think, not a demand: a model that cannot reason answers without. An effort
  is a demand, `output_config.effort` as well as `reasoning_effort`, and such a model refuses it by name.
- `budget_tokens` may be left out, is checked as Anthropic does, and is not enforced; `max_tokens` is, and may be more
  than fits.
- Answers carry `deepinfra` here too, and a request may have a `seed`.
- At most four blocks may have `cache_control`; every prefix is cached, marked or not, and a longer `ttl` may stand
  behind a shorter one.
- `/v1/models` has OpenAI's fields and Anthropic's, and its pages.
"""


def _receipt_tables() -> str:
    """A table for each of a receipt's objects, from the docstrings of their classes."""
    asked = {Receipt: "", ExecutorFacts: ".executors[]", Asked: ".requests[]", Answered: ".requests[].answers[]"}
    return "\n\n".join(attribute_table(f"`receipt{where}`", kind) for kind, where in asked.items())


def _classes() -> str:
    """The words that the header may say."""
    *most, last = map(code, get_args(Traffic))
    return f"{', '.join(most)} or {last}"


def _keys() -> str:
    return "\n".join(f"| {code(name)} | {info.description} |" for name, info in KeyEntry.model_fields.items())


def _messages() -> str:
    rows = []
    for model in (PlainMessage, UserMessage, AssistantMessage, ToolMessage):
        roles = ", ".join(code(role) for role in typing.get_args(model.model_fields["role"].annotation))
        for name, info in model.model_fields.items():
            if name != "role":
                takes = "string, or array of parts" if name == "content" else accepts(info)
                rows.append((roles, code(name), takes.replace("null", "`null` only")))
    return table(("role", "field", "takes"), rows)


def error_codes() -> str:
    """Errors."""

    def below(root: type[errors.DeepinfraError]) -> Iterator[type[errors.DeepinfraError]]:
        for each in root.__subclasses__():
            if each.__module__ == errors.__name__:
                yield each
                yield from below(each)

    def on_the_wire(word: str, at_start: bool = False) -> tuple[str, str]:
        if at_start:
            return "", ""
        status, _, wire = STATUS.get(word, (500, "server_error", word))
        return str(status), code(wire)

    at_start = (errors.ConfigError, errors.ModelError, errors.ResourceError)
    rows = [
        (code(each.code), code(each.__name__), *on_the_wire(each.code, issubclass(each, at_start)), meaning(each))
        for each in below(errors.DeepinfraError)
    ]
    rows += [(code(word), "", *on_the_wire(word), text) for word, text in OTHER_CODES.items()]
    return f"""# Errors

Every error has a code. In Python it is `error.code` of an exception from `deepinfra.errors`; on the wire it is
`error.code` of OpenAI's error object, in OpenAI's word where there is one. An answer that fails after its stream has
begun ends with an error event of the same shape. 503 `overloaded` and 429 carry a header `retry-after`. Errors without
a status are met at the start, before anything is served, or by who uses the package from Python.

{table(("code", "exception", "status", "code on the wire", "meaning"), rows)}
"""


def metric_names() -> str:
    """Metrics."""
    rows = []
    for family in anyio.run(_families):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(code(label) for label in family._labelnames)
        rows.append((code(name), family.type, labels, family.documentation))
    return f"""# Metrics

`GET /metrics` in the words of Prometheus, read from the engine when somebody scrapes. A histogram has `_bucket`,
`_sum` and `_count`.

{table(("name", "type", "labels", "meaning"), rows)}
"""


def interface_pages() -> str:
    """Interfaces."""
    sections = [
        class_section(getattr(deepinfra.interfaces, name))
        for name in ("Component", *(part.__name__ for part in INTERFACES.values()))
    ]
    sections += [
        class_section(getattr(deepinfra.interfaces, name))
        for name in ("Tokenizer", "OutputParser", "StepHandle", "KVMemory", "Clock", "Offload")
    ]
    hooks = [
        f"### `{signature(getattr(hookspecs, name))}`\n\n{text_of(inspect.getdoc(getattr(hookspecs, name)))}"
        for name in ("deepinfra_register", "deepinfra_routes", "deepinfra_observers")
    ]
    body, hook_body = "\n\n".join(sections), "\n\n".join(hooks)
    return f"""# Interfaces

The six parts derive from `Component`; a plug-in implements one of them and imports only `deepinfra.core`,
`deepinfra.interfaces`, `deepinfra.errors`, `deepinfra.registry` and `deepinfra.testing`. Methods marked *abstract* have
to be written, the others have a default. What is passed is defined in `deepinfra.core`.

{body}

## Hooks

{text_of(inspect.getdoc(hookspecs))}

{hook_body}
"""


async def _families() -> list[typing.Any]:
    async with _engine() as engine:
        return list(metrics.registry({"m": engine}).collect())


def _engine() -> Engine:
    return Engine(TinyRecipe(), Pool(Fcfs(), ToyExecutor()))


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "parts.md": parts,
    "cli.md": cli,
    "http-api.md": http_api,
    "errors.md": error_codes,
    "metrics.md": metric_names,
    "interfaces.md": interface_pages,
}


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
