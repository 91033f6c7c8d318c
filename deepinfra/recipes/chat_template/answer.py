"""How the answers to a prompt are read, from the state in which the prompt leaves the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from deepinfra.core.conversation import Constraint, Conversation
from deepinfra.core.events import Event, ReasoningDelta, TextDelta, TokenLogprobs, ToolEnd
from deepinfra.core.request import FinishReason
from deepinfra.interfaces import OutputParser
from deepinfra.recipes.chat_template.rendering import Rendered
from deepinfra.recipes.output.constraint import compose
from deepinfra.recipes.output.family import ToolFamily, output_grammar
from deepinfra.recipes.output.grammar import Grammar

__all__ = ("Answers", "Continued")


@dataclass(frozen=True, slots=True)
class Answers:
    """The syntax of a model's answers.

    Attributes:
        control: Spelling and id of the control tokens that count in an answer.
        reasoning: Opening and closing marker.
        family: How it calls tools.
        plain: Reads answers of a model that has no tools.
        calling: Reads answers of one that has.
    """

    control: Mapping[str, int]
    reasoning: tuple[str, str] | None
    family: ToolFamily
    plain: Grammar
    calling: Grammar

    @classmethod
    def of(cls, control: Mapping[str, int], reasoning: tuple[str, str] | None, family: ToolFamily) -> Answers:
        """Make both grammars. A family without entries is how the model writes everything, with tools and without."""
        if not family.entries:
            everything = output_grammar(control, family=family)
            return cls(control, reasoning, family, everything, everything)
        plain, calling = output_grammar(control, reasoning), output_grammar(control, reasoning, family)
        return cls(control, reasoning, family, plain, calling)

    def start(self, rendered: Rendered) -> tuple[str, bool]:
        """The state in which an answer begins, and whether it may still open its reasoning.

        A block of calls is opened if the prompt ends so; else the last marker of reasoning decides that the template
        wrote behind the last other control token.
        """
        text, trust = rendered.text.rstrip(), rendered.trust
        opener = self.family.opener.strip()
        if opener and text.endswith(opener) and 0 not in trust[len(text) - len(opener) : len(text)]:
            return "tool", False
        markers = self.reasoning or ()
        ends = (end for start, end in reversed(rendered.ranges) if rendered.text[start:end] not in markers)
        tail = next(ends, 0)
        opened, closed = (_last_trusted(rendered, marker, tail) for marker in markers) if markers else (-1, -1)
        if max(opened, closed) >= 0:
            return "reasoning" if opened > closed else "text", False
        return ("header" if "header" in self.family.states and not self.family.entries else "text"), True

    def constraint(self, conversation: Conversation, start: str, opens: bool) -> Constraint | None:
        """What the whole answer must match; `start` and `opens` from `start`.

        Raises:
            UnsupportedFieldError: It is demanded, and cannot be said for this model.
        """
        reasoning = self.reasoning if start == "reasoning" or opens else None
        begins = "text" if start == "header" else start
        return compose(conversation, control=self.control, start=begins, reasoning=reasoning, family=self.family)


def _last_trusted(rendered: Rendered, marker: str, tail: int) -> int:
    text, trust = rendered.text, rendered.trust
    at = text.rfind(marker, tail)
    while at >= 0 and 0 in trust[at : at + len(marker)]:
        at = text.rfind(marker, tail, at + len(marker) - 1)
    return at


class Continued:
    """Reads an answer whose beginning the conversation gave; see `OutputParser`.

    The beginning is parsed too, so that an answer can begin inside a call. Its text is not said again; what it says of
    that call is, since a client knows calls by their events only. A call that it holds whole is none of the model's:
    then all of it is text.

    Args:
        make: A new parser.
        begun: The beginning.
        ids: Its ids.
    """

    def __init__(self, make: Callable[[], OutputParser], begun: str, ids: Sequence[int]) -> None:
        self._parser = make()
        self._calls: list[Event] = []
        said = ""
        for event in self._parser.feed(ids):
            if isinstance(event, (TextDelta, ReasoningDelta)):
                said += event.text
            else:
                self._calls.append(event)
        if any(isinstance(event, ToolEnd) for event in self._calls):
            self._parser, self._calls, said = make(), [], begun
        self._unsaid = begun[len(said) :] if begun.startswith(said) and not self._calls else ""

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Sequence[Event]:
        """See `OutputParser.feed`."""
        return self._new(self._parser.feed(ids, logprobs))

    def finish(self, reason: FinishReason) -> Sequence[Event]:
        """See `OutputParser.finish`."""
        return self._new(self._parser.finish(reason))

    @property
    def space(self) -> str:
        """See `OutputParser.space`."""
        return "" if self._unsaid else self._parser.space

    def _new(self, events: Sequence[Event]) -> list[Event]:
        """Leave out the end of the beginning, which the parser held back because a marker might have begun in it."""
        new, self._calls = self._calls, []
        for event in events:
            if not self._unsaid:
                new.append(event)
            elif not isinstance(event, (TextDelta, ReasoningDelta)):
                self._unsaid = ""  # it was the beginning of a marker
                new.append(event)
            else:
                held, text = self._unsaid, event.text
                same = next(
                    (at for at, (a, b) in enumerate(zip(held, text, strict=False)) if a != b), min(len(held), len(text))
                )
                self._unsaid = held[same:] if same == len(text) else ""
                if same < len(text) or event.tokens:
                    new.append(replace(event, text=text[same:]))
        return new
