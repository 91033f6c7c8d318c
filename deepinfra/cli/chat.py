"""`deepinfra chat`: a conversation without a server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfra.cli.failures import sentence_for
from deepinfra.cli.setup import OFFLINE, Config, Model, blueprint_for, fetch_models

if TYPE_CHECKING:
    from concurrent.futures import Future

    from deepinfra.cli.talk import Answered

__all__ = ("chat",)


def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="Instructions before the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed and words give the same answers.")] = None,
    config: Config = None,
) -> None:
    """Talk to a model in this process.

    Ctrl-C stops an answer, Ctrl-D ends the conversation.

    Without a terminal each input line is a turn; an empty line follows each answer.
    """
    from anyio.from_thread import start_blocking_portal

    from deepinfra.cli.talk import answer, write
    from deepinfra.core.conversation import Conversation, Message, TextPart
    from deepinfra.core.request import GenerateRequest
    from deepinfra.core.sampling import SamplingParams

    blueprint = blueprint_for(config, {"model": model}, defaults=OFFLINE).without_stores()
    fetch_models(blueprint)
    engine = blueprint.build()
    messages = [Message(role="system", content=(TextPart(system),))] if system else []
    # The engine has a thread of its own, so that this one can wait for the keyboard with line editing.
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine):
        if sys.stdin.isatty():
            typer.echo(f"{engine.name}. Ctrl-C stops an answer, Ctrl-D ends.", err=True)
        while (line := _read_line()) is not None:
            if not line.strip():
                continue
            messages.append(Message(role="user", content=(TextPart(line),)))
            request = GenerateRequest(
                input=Conversation(messages=tuple(messages)),
                sampling=SamplingParams(temperature=temperature),
                max_tokens=max_tokens,
                seed=seed,
            )
            pieces: list[str] = []

            def show(text: str, pieces: list[str] = pieces) -> None:
                pieces.append(text)
                write(text)

            stopped = _wait(portal.start_task_soon(answer, engine, request, show))
            write("\n\n")
            if stopped and sys.stdin.isatty():
                typer.echo(stopped, err=True)
            elif stopped:
                raise typer.Exit(_complain(stopped))
            # What was said stays said, also if it was stopped.
            messages.append(Message(role="assistant", content=(TextPart("".join(pieces)),)))


def _read_line() -> str | None:
    """The next turn; `None` at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        import readline  # noqa: F401  gives `input` history and line editing
    except ImportError:
        pass
    while True:
        try:
            return input("> ")
        except EOFError:
            typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo()


def _wait(future: Future[Answered]) -> str:
    """Wait for an answer; words for why it is not whole, empty if it is."""
    try:
        future.result()
    except KeyboardInterrupt:
        future.cancel()
        return "stopped"
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        return sentence
    return ""


def _complain(sentence: str) -> int:
    typer.echo(f"deepinfra: {sentence}", err=True)
    return 1
