"""What stands for the log-probabilities of an answer in its receipt."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from deepinfra.core.events import TokenLogprobs

__all__ = ("LogprobDigest",)


class LogprobDigest:
    """SHA-256 over log-probabilities as they are told, token by token: two answers with one digest have the same.

    It is known behind every token, as a replay computes all answers as long as the longest one was.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._behind = [self._digest.digest()]

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        """Take the entries of further tokens."""
        for entry in entries:
            told = [(entry.token, entry.logprob), *((top.token, top.logprob) for top in entry.top)]
            self._digest.update(struct.pack("<I", len(told)) + b"".join(struct.pack("<qd", *each) for each in told))
            self._behind.append(self._digest.digest())

    def hex(self, tokens: int) -> str:
        """What it was behind the first `tokens`, or behind the last of those there are."""
        return self._behind[min(tokens, len(self._behind) - 1)].hex()
