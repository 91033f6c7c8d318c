"""Which field of a request keeps it from sharing a longer prefix with an earlier one, and the tokens it costs. Pure.

The earlier request is the last one of the same session, else the one with most text in common. Differences between
the two are undone one by one, in a copy, and the copy is rendered: the difference whose undoing lets the common prefix
grow is what breaks it, whatever the template does with the field. Its cost is the growth, less what really changed.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from deepinfra.cli.cache.changes import ADVICE, Body, Change, Kind, changes
from deepinfra.core.conversation import JsonValue
from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import block_keys
from deepinfra.engine.explain import shared
from deepinfra.errors import RequestError

__all__ = ("Asked", "Finding", "Lint", "lint")

Render: TypeAlias = Callable[["Asked", Body], Sequence[int]]
"""Token ids of a request with this body.

Raises:
    RequestError: It cannot be rendered.
"""

_BREAKS = 4
"""Fields that are told for one request: one behind the other, each with what it costs besides those before."""

_PIECE = re.compile(r"[^\n.!?]{16,}")
_PIECES = 1024
_LATEST = 4


class Asked(NamedTuple):
    """One request of a log: its line, its body, whose it is, and the API it was sent to if that is known."""

    line: int
    body: Body
    tenant: str = "public"
    session: str = ""
    api: str | None = None


@dataclass(slots=True)
class Finding:
    """One field that breaks prefixes, summed over a log.

    Attributes:
        field: As in `messages[0].content`.
        kind: What the change looks like.
        tokens: What it cost: tokens that an earlier request had too, behind the field.
        requests: In how many.
        line: Of the one in which it cost most.
        earlier: Line of the request it could have shared more with.
        held: What stood in the field there.
        asked: What stands there now.
    """

    field: str
    kind: Kind
    tokens: int = 0
    requests: int = 0
    line: int = 0
    earlier: int = 0
    held: str = ""
    asked: str = ""
    most: int = 0

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]


@dataclass(slots=True)
class Lint:
    """What was found.

    Attributes:
        requests: That could be rendered.
        prompt_tokens: All tokens of their prompts.
        shared_tokens: Those in whole blocks that an earlier prompt began with.
        findings: By cost.
        failed: Lines that could not be rendered, and why.
    """

    requests: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    findings: list[Finding] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def lost_tokens(self) -> int:
        """What all findings cost together."""
        return sum(finding.tokens for finding in self.findings)


class _Seen(NamedTuple):
    asked: Asked
    ids: Sequence[int]


class _Group:
    """Requests that may share KV: of one tenant, model, salt and API."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys: set[BlockKey] = set()
        self._seen: list[_Seen] = []
        self._sessions: dict[str, int] = {}
        self._pieces: dict[int, deque[int]] = {}
        self._counts: Counter[int] = Counter()

    def held(self, keys: Sequence[BlockKey]) -> int:
        """Tokens of whole leading blocks that are known."""
        return self._block_size * next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def like(self, asked: Asked, pieces: Mapping[int, int]) -> _Seen | None:
        """The earlier request that this one should have shared most with."""
        if asked.session and asked.session in self._sessions:
            return self._seen[self._sessions[asked.session]]
        score: dict[int, float] = {}
        for piece, length in pieces.items():  # what few requests say tells more than what all do
            for index in self._pieces.get(piece, ()):
                score[index] = score.get(index, 0.0) + length / self._counts[piece]
        if not score:
            return None
        best = max(score.items(), key=lambda item: (item[1], item[0]))
        return self._seen[best[0]]

    def add(self, asked: Asked, ids: Sequence[int], keys: Iterable[BlockKey], pieces: Iterable[int]) -> None:
        """Remember a request."""
        index = len(self._seen)
        self._seen.append(_Seen(asked, array("I", ids)))  # a log may have more tokens than memory has room for objects
        self._keys.update(keys)
        if asked.session:
            self._sessions[asked.session] = index
        for piece in pieces:
            self._counts[piece] += 1
            self._pieces.setdefault(piece, deque(maxlen=_LATEST)).append(index)


def lint(requests: Iterable[Asked], render: Render, count: Callable[[str], int], *, block_size: int = 16) -> Lint:
    """Go through a log in order.

    Args:
        requests: In order of arrival.
        render: Makes ids of a body.
        count: Tokens of a text.
        block_size: Tokens per block; a cost below it is not told.
    """
    result = Lint()
    groups: dict[tuple[str, ...], _Group] = {}
    found: dict[tuple[str, Kind], Finding] = {}
    for asked in requests:
        try:
            ids = render(asked, asked.body)
        except RequestError as error:
            result.failed.append((asked.line, str(error)))
            continue
        name = (asked.tenant, *(str(asked.body.get(key, "")) for key in ("model", "cache_salt")), asked.api or "")
        group = groups.setdefault(name, _Group(block_size))
        keys = block_keys(BlockKey(b""), ids, block_size)
        held = group.held(keys)
        result.requests += 1
        result.prompt_tokens += len(ids)
        result.shared_tokens += held
        pieces = _pieces(asked.body)
        earlier = group.like(asked, pieces)
        if earlier is not None and held + block_size <= len(ids):
            told = set[tuple[str, Kind]]()
            for change, cost in _breaks(earlier, _Seen(asked, ids), held, render, count):
                if cost >= block_size:
                    key = change.field, change.kind
                    finding = found.setdefault(key, Finding(*key))
                    _note(finding, change, cost, asked.line, earlier.asked.line, new=key not in told)
                    told.add(key)
        group.add(asked, ids, keys, pieces)
    result.findings = sorted(found.values(), key=lambda finding: -finding.tokens)
    return result


def _breaks(
    earlier: _Seen, later: _Seen, held: int, render: Render, count: Callable[[str], int]
) -> Iterator[tuple[Change, int]]:
    """Differences that end the common prefix, in its order, each undone before the next is looked for."""
    body, at = later.asked.body, shared(later.ids, earlier.ids)
    for _ in range(_BREAKS):
        if at >= len(earlier.ids):
            return
        for change in changes(earlier.asked.body, body):
            try:
                ids = render(later.asked, change.undone)
            except RequestError:
                continue  # a history without this difference is none
            grown = shared(ids, earlier.ids)
            if grown > at:
                break
        else:
            return
        gain = grown - max(at, held)
        yield change, gain - min(gain, count(change.changed)) if gain > 0 else 0
        body, at = change.undone, grown


def _note(finding: Finding, change: Change, cost: int, line: int, earlier: int, *, new: bool) -> None:
    finding.tokens += cost
    finding.requests += new
    if cost > finding.most:
        finding.most, finding.line, finding.earlier = cost, line, earlier
        finding.held, finding.asked = change.held, change.asked


def _pieces(body: Body) -> dict[int, int]:
    """Hashes of the sentences of a request, with their lengths; a changed one leaves the others what they are."""
    pieces: dict[int, int] = {}
    stack: list[JsonValue] = list(body.values())
    while stack and len(pieces) < _PIECES:
        value = stack.pop()
        if isinstance(value, str):
            for match in _PIECE.finditer(value):
                pieces[hash(match[0])] = match.end() - match.start()
                if len(pieces) >= _PIECES:
                    break
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, Sequence):
            stack += value
    return pieces
