"""Measured steps in a file, so that the next start knows from its first step how long steps take here."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from deepinfra.core.cost import Sample, StepCost, StepWork
from deepinfra.interfaces.given import Offload
from deepinfra.schedulers.predictor import MEMORY, StepPredictor

__all__ = ("Timings", "kept")

_log = logging.getLogger("deepinfra.schedulers")

_FORMAT = 1
_MOST_NBYTES = 1 << 20
_MOST, _LEAST_S = 1e15, 1e-6
_MOST_STEPS = 8 * MEMORY  # of eight kinds; 75,000 that fit into a file took the event loop two seconds to learn from
_SAVE_EVERY_S = 60.0


class Timings:
    """One file of a folder: the steps measured with one executor on one machine. Both calls block.

    The file is JSON; `cost` in it is for people, `steps` is what is read again. Files of other executors, other
    weights or other numbers of threads have other names.

    Args:
        folder: Made when something is saved.
        speed: What decides how long steps take; see `Executor.speed`.
    """

    def __init__(self, folder: str | Path, speed: str) -> None:
        self._speed, self._complained = speed, ""
        self.path = Path(folder).expanduser() / f"{hashlib.sha256(speed.encode()).hexdigest()[:16]}.json"

    def load(self) -> Sequence[Sample]:
        """The steps saved last; none if there is no file, or, with a warning, if it cannot be used."""
        try:
            with self.path.open("rb") as file:
                return self._parse(file.read(_MOST_NBYTES + 1))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            _log.warning("measured step times in %s are ignored: %s", self.path, error)
            return ()

    def save(self, cost: StepCost, samples: Iterable[Sample]) -> bool:
        """Replace the file at once; a folder that cannot be written to costs one warning. Returns whether it did."""
        told = {
            "format": _FORMAT,
            "speed": self._speed,
            "cost": cost._asdict(),
            "fields": [*StepWork._fields, "seconds"],
            "steps": [[*sample.work, sample.seconds] for sample in samples],
        }
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(json.dumps(told))
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._complained:  # a save is tried every minute
                _log.warning("measured step times could not be saved in %s: %s", self.path, reason)
                self._complained = reason
            return False
        self._complained = ""
        return True

    def _parse(self, data: bytes) -> Sequence[Sample]:
        if len(data) > _MOST_NBYTES:
            raise ValueError(f"it is larger than {_MOST_NBYTES} bytes")
        told = json.loads(data)
        if told["format"] != _FORMAT:
            raise ValueError(f"it has format {told['format']}, not {_FORMAT}")
        if told["speed"] != self._speed:
            raise ValueError("it is of another executor")
        if len(told["steps"]) > _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS} steps")
        return [_sample(step) for step in told["steps"]]


def _sample(step: Sequence[float]) -> Sample:
    *work, seconds = step
    if len(work) != len(StepWork._fields) or any(isinstance(value, bool) for value in step):
        raise ValueError(f"{step!r} is no step")
    if not all(math.isfinite(value) and 0.0 <= value <= _MOST for value in step) or seconds < _LEAST_S:
        raise ValueError(f"{step!r} has a number that no step has")
    chunk_tokens, chunk_reads, decode_rows, decode_reads, drafts = work
    return Sample(StepWork(int(chunk_tokens), chunk_reads, int(decode_rows), decode_reads, int(drafts)), seconds)


@asynccontextmanager
async def kept(predictor: StepPredictor, timings: Timings | None, offload: Offload) -> AsyncGenerator[None]:
    """Restore what a predictor learned in an earlier life, and save it every minute and at the end.

    A life of fewer than `MEMORY` steps leaves the file as it is.
    """
    if timings is None:
        yield
        return
    if not predictor.learned:
        predictor.restore(await offload(timings.load))
    saved = 0

    async def save() -> None:
        nonlocal saved
        if predictor.cost is not None and predictor.learned - saved >= MEMORY:
            saved = predictor.learned
            await offload(timings.save, predictor.cost, tuple(predictor.samples))

    async def save_now_and_then() -> None:
        while True:
            await anyio.sleep(_SAVE_EVERY_S)
            await save()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save_now_and_then)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await save()
    except BaseExceptionGroup as group:  # what was raised inside leaves as itself
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__
