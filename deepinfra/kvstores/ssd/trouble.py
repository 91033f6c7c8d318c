"""Says in the log why saves are dropped, and when they work again: a cache that fails in silence only looks slow."""

from __future__ import annotations

import logging
from pathlib import Path

from deepinfra.interfaces.given import Clock

__all__ = ("Trouble",)

_log = logging.getLogger("deepinfra.kvstores")

PAUSE_S = 60.0
"""Seconds between warnings about one folder."""


class Trouble:
    """Warns about one folder, once a minute at most."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._next = 0.0
        self._reason = ""
        self._dropped = 0  # since the last warning
        self._warned = False

    def blame(self, reason: OSError | str) -> None:
        """Note why something failed just now; `dropped` tells whether anything was lost by it."""
        if isinstance(reason, BlockingIOError):
            self._reason = "another process has it locked and does not answer"
        elif isinstance(reason, OSError):
            self._reason = reason.strerror or str(reason) or type(reason).__name__
        else:
            self._reason = reason

    def dropped(self, records: int) -> None:
        """So many records were not saved; if that is to be blamed on something, warn of it."""
        reason, self._reason = self._reason, ""
        if reason and records:
            self._dropped += records
            self._warn(f"{self._dropped} records were not saved: {reason}")

    def replaced(self) -> None:
        """The folder was removed under us, and is there again."""
        self._warn("it was removed, or this process's files in it were; going on with what is in it now")

    def saved(self) -> None:
        """A save worked."""
        if self._warned:
            self._warned = False
            _log.info("KV folder %s: saving works again", self._path)

    def _warn(self, text: str) -> None:
        now = self._clock.now()
        if now >= self._next:
            self._next, self._warned, self._dropped = now + PAUSE_S, True, 0
            _log.warning("KV folder %s: %s", self._path, text)
