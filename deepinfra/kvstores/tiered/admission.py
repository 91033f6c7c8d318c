"""Which records are worth writing to a tier, by class of traffic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, Traffic
from deepinfra.kvstores.tiered.recent import Recent

__all__ = ("Admission", "WriteRules", "parse_rule")

WriteRules: TypeAlias = str | Mapping[str, str]
"""A rule for all traffic, or rules by class (`default`, `agent`, `chat`); classes left out write all."""

_RULE = re.compile(r"(all|second-touch)|prefix-depth:([1-9][0-9]{0,8})")


class _Rule(NamedTuple):
    kind: Literal["all", "second-touch", "prefix-depth"]
    depth: int = 0


def parse_rule(text: str) -> _Rule:
    """What a rule's text means.

    Raises:
        ValueError: It is none of `all`, `second-touch`, `prefix-depth:N`.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is none of 'all', 'second-touch', 'prefix-depth:N' with N blocks from 1 on")
    if match[2]:
        return _Rule("prefix-depth", int(match[2]))
    return _Rule("second-touch" if match[1] == "second-touch" else "all")


class Admission:
    """The rules of one tier.

    `all` writes everything; `second-touch` what is offered again, or used above, after it was not written, among the
    last 65,536 such records; `prefix-depth:N` the first N blocks of a prefix. How deep a block is follows from its
    parent, so of a prefix whose beginning was last offered before 65,536 other shallow blocks (or by another process)
    nothing is written until it is offered from its beginning again.
    """

    def __init__(self, write: WriteRules) -> None:
        by_class = {"default": write, "agent": write, "chat": write} if isinstance(write, str) else write
        self._rules = {traffic: parse_rule(text) for traffic, text in by_class.items()}
        self._deepest = max((rule.depth for rule in self._rules.values()), default=0)
        self._depths: Recent[int] = Recent()

    def admits(self, record: KVRecord, *, seen: bool) -> bool:
        """Whether to write a record that is not written; `seen`: it was offered before."""
        depth = self._depth(record) if self._deepest else 0
        rule = self._rules.get(record.retention.traffic)
        if rule is None or rule.kind == "all":
            return True
        return seen if rule.kind == "second-touch" else 0 < depth <= rule.depth

    def admits_again(self, key: BlockKey, traffic: Traffic) -> bool:
        """Whether to write a block that was offered before and left out, if it were offered again."""
        rule = self._rules.get(traffic)
        return rule is None or rule.kind != "prefix-depth" or 0 < (self._depths.get(key) or 0) <= rule.depth

    def asks_for_two(self, traffic: Traffic) -> bool:
        """Whether what is offered for the first time is left out."""
        rule = self._rules.get(traffic)
        return rule is not None and rule.kind == "second-touch"

    def _depth(self, record: KVRecord) -> int:
        """Number of the record's block in its prefix, from 1; 0 for deeper than any rule asks, or unknown."""
        above = 0 if record.parent == record.namespace else self._depths.get(record.parent)
        if above is None or above >= self._deepest:
            return 0
        self._depths.add(record.ref.key, above + 1)
        return above + 1
