"""`deepinfra cache lint`: which fields of the requests in a log keep their prompts from being found in the cache."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from deepinfra.cli.prompts import Api, ApiOption, RecipeName, api_of, inputs_of, prompt_of, with_recipe
from deepinfra.cli.setup import Config, Model
from deepinfra.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deepinfra.cli.cache.changes import Body
    from deepinfra.cli.cache.prefixes import Asked, Finding, Lint
    from deepinfra.interfaces import Recipe

__all__ = ("lint",)

_FAILED_SHOWN = 5


def lint(
    file: Annotated[str, typer.Argument(metavar="REQUESTS.jsonl", help="One request a line; - reads standard input.")],
    model: Model = None,
    recipe_name: RecipeName = None,
    api: ApiOption = None,
    config: Config = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block; smaller losses are not told.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the fields that break prefixes in a log of requests, and the tokens that each of them cost.

    A line is the JSON body of a request in any of the APIs, in order of arrival; `tenant` and `session` may stand
    beside its fields. A line {"body": {...}, "url": "/v1/chat/completions", "session": "s1"} is read too, which is how
    OpenAI's batches are written. Each request is compared with the last one of its session, or else with the one that
    is most like it.

    Exits 1 if no line could be read or rendered.

    Example: deepinfra cache lint requests.jsonl --model smollm2
    """
    requests = list(_read(file, api))
    if not requests:
        raise ConfigError(f"{file} holds no request")

    def run(recipe: Recipe) -> Lint:
        from deepinfra.cli.cache.prefixes import lint as find

        def render(asked: Asked, body: Body) -> Sequence[int]:
            return prompt_of(recipe, inputs_of(body, cast("Api | None", asked.api))[0]).ids

        return find(requests, render, lambda text: len(recipe.tokenizer.encode(text)), block_size=block_size)

    report = with_recipe(run, config, model, recipe_name)
    if as_json:
        typer.echo(json.dumps(_document(report), ensure_ascii=False))
    else:
        _print(report)
    for line, why in report.failed[:_FAILED_SHOWN]:
        typer.echo(f"line {line} was left out: {why}", err=True)
    if len(report.failed) > _FAILED_SHOWN:
        typer.echo(f"and {len(report.failed) - _FAILED_SHOWN} more lines", err=True)
    if not report.requests:
        raise typer.Exit(1)


def _read(file: str, api: Api | None) -> Iterator[Asked]:
    """The requests of a log; lines that hold none are said and left out."""
    from deepinfra.api.body import parse_object
    from deepinfra.cli.cache.prefixes import Asked
    from deepinfra.errors import RequestError

    with ExitStack() as stack:
        source = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
        for number, line in enumerate(source, 1):
            if not line.strip():
                continue
            try:
                raw = parse_object(line)
                body = raw.get("body", raw)
                if not isinstance(body, dict):
                    raise RequestError("'body' must be an object", "body")
                names = {name: raw.get(name) for name in ("tenant", "session", "url")}
                for name, value in names.items():
                    if not isinstance(value, str | None):
                        raise RequestError(f"{name!r} must be a string", name)
            except RequestError as error:
                typer.echo(f"line {number} was left out: {error}", err=True)
                continue
            fields = {key: value for key, value in body.items() if key not in ("tenant", "session")}
            which = api or _api_of(str(names["url"] or "")) or api_of(fields)
            tenant, session = names["tenant"], names["session"]
            yield Asked(number, fields, str(tenant or "public"), str(session or ""), which)


def _api_of(url: str) -> Api | None:
    ends: dict[str, Api] = {"chat/completions": "chat", "completions": "completions"}
    ends |= {"responses": "responses", "messages": "messages"}
    return next((api for end, api in ends.items() if url.endswith(f"/v1/{end}")), None)


def _document(report: Lint) -> dict[str, object]:
    return {
        "requests": report.requests,
        "prompt_tokens": report.prompt_tokens,
        "shared_tokens": report.shared_tokens,
        "lost_tokens": report.lost_tokens,
        "findings": [_finding(finding) for finding in report.findings],
        "failed": [{"line": line, "why": why} for line, why in report.failed],
    }


def _finding(finding: Finding) -> dict[str, object]:
    document = {**dataclasses.asdict(finding), "advice": finding.advice}
    del document["most"]
    return document


def _print(report: Lint) -> None:
    total = report.prompt_tokens or 1
    typer.echo(
        f"{report.requests} requests, {report.prompt_tokens} prompt tokens: {report.shared_tokens} "
        f"({100 * report.shared_tokens / total:.0f} %) begin as an earlier prompt does, "
        f"{report.lost_tokens} ({100 * report.lost_tokens / total:.0f} %) more could"
    )
    if not report.findings:
        typer.echo("no field breaks a prefix")
    for finding in report.findings:
        requests = "1 request" if finding.requests == 1 else f"{finding.requests} requests"
        typer.echo(f"\n{finding.tokens:>9} tokens in {requests}: {finding.field} ({finding.kind})")
        typer.echo(f"          {finding.advice}")
        typer.echo(f"          line {finding.line}:  {finding.asked!r}")
        typer.echo(f"          line {finding.earlier}:  {finding.held!r}")
