"""Runs steps, one after the other, on the thread it lives on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfra.core.ids import Epoch, SeqId
from deepinfra.core.sampling import Purpose, stream_key
from deepinfra.core.step import (
    MaskRows,
    SeqFailure,
    SeqOpen,
    SeqOutput,
    Snapshot,
    StepPlan,
    StepResult,
    TokenProbs,
    WorkItem,
)
from deepinfra.errors import ExecutorError, StepFailed
from deepinfra.executors.torch.blocks import KVBlocks
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.rows import Drawn, Row, Rows, StepModel

if TYPE_CHECKING:
    from deepinfra.executors.torch.windows import Window, Windows

__all__ = ("Runner",)


class _Seq:
    """An open sequence: its tokens so far, its block table, its window from its first item on."""

    __slots__ = ("_buffer", "epoch", "error", "length", "opened", "table", "window")

    def __init__(self, opened: SeqOpen, error: str) -> None:
        self.opened, self.error = opened, error
        self.epoch: Epoch = opened.epoch
        self.length = len(opened.tokens)
        self._buffer = np.array(opened.tokens, np.int64)
        self.table = array("q", opened.blocks)  # numpy takes it as it is; of a list it looks at each block each step
        self.window: Window | None = None

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._buffer[: self.length]

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self.tokens, np.empty(max(256, end), np.int64)))
        self._buffer[self.length : end] = tokens
        self.length = end


class _Work(NamedTuple):
    """An item that can be computed, its sequence and its rows."""

    item: WorkItem
    seq: _Seq
    rows: Rows


class Runner:
    """A model with its KV and open sequences; not thread-safe.

    Args:
        model: With its weights.
        config: What it is made of.
        kv: Its blocks.
        windows: Its sequences' windows, if it has layers that keep them.
        slot: Gives a staging slot's bytes.
        now: Seconds, for `StepResult.seconds`.
    """

    def __init__(
        self,
        model: StepModel,
        config: DecoderConfig,
        kv: KVBlocks,
        windows: Windows | None,
        slot: Callable[[int], memoryview],
        now: Callable[[], float],
    ) -> None:
        self._model, self._config, self._kv, self._windows = model, config, kv, windows
        self._slot, self._now = slot, now
        self._seqs: dict[SeqId, _Seq] = {}
        # Blocks that may hold numbers that are not finite; zeroed before another sequence writes to them.
        self._tainted: set[int] = set()

    def run(self, plan: StepPlan, masks: Callable[[], MaskRows]) -> StepResult:
        """Run one step; `masks` waits for the masks of a masked plan.

        A sequence whose numbers are not finite fails alone, in the result.

        Raises:
            StepFailed: An item does not fit its sequence (only that one is named), or torch failed (every sequence that
                has an item is). What the plan told stands, nothing was computed or sampled.
        """
        began = self._now()
        failed: list[SeqFailure] = []
        outputs: tuple[SeqOutput, ...] = ()
        try:
            self._apply(plan)
            if work := [self._admit(item) for item in plan.items]:
                outputs = self._compute(work, masks if plan.masked else None, failed)
        except ExecutorError:
            raise
        except Exception as error:  # what computes raises what it likes; the thread and the other sequences live on
            raise StepFailed([item.seq for item in plan.items], f"{type(error).__name__}: {error}") from error
        return StepResult(plan.step, outputs, self._now() - began, tuple(failed))

    def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits `[tokens, vocab]` of a text from position 0 on, computed in one step that nothing is kept of.

        Raises:
            ExecutorError: A sequence is open, whose blocks would be written to, or the text does not fit.
        """
        need = -(-len(tokens) // self._kv.block_size)
        if self._seqs or self._windows is not None:
            raise ExecutorError("a text is scored while no sequence is open, and by models without windows")
        if not tokens or need > self._kv.num_blocks or len(tokens) > self._config.max_positions:
            raise ExecutorError(f"a text of {len(tokens)} tokens does not fit")
        self._model.compute([Rows(np.array(tokens, np.int64), 0, 0, range(need), None, len(tokens))])
        return self._model.logits()

    def parts(self) -> Mapping[str, float]:
        """Seconds of each part of the last step, as far as its model measures them."""
        return self._model.seconds()

    def _apply(self, plan: StepPlan) -> None:
        bad = {snapshot.seq: why for snapshot in plan.snapshots if (why := self._snapshot(snapshot))}
        for closed in plan.closed:
            self._close(closed)
        starts = {(item.seq, item.epoch): item.start for item in reversed(plan.items)}
        for opened in plan.opened:
            self._close(opened.seq)
            new = self._seqs[opened.seq] = _Seq(opened, self._why_not(opened))
            if opened.restore >= 0:
                new.error = new.error or self._restore(new, starts.get((opened.seq, opened.epoch)))
        for item in plan.items:
            seq = self._seqs.get(item.seq)
            if item.blocks and seq is not None and seq.epoch == item.epoch:
                seq.error = seq.error or self._bad_blocks(item.blocks)
                seq.table.extend(item.blocks)
                self._clear_tainted(item.blocks)
        for fill in plan.fills:
            self._kv.fill(fill, self._slot(fill.slot))
            self._tainted.discard(fill.block)
        if plan.placement is not None:
            raise ValueError("this executor does not place experts")
        if bad:
            raise StepFailed(list(bad), "; ".join(bad.values()))

    def _snapshot(self, snapshot: Snapshot) -> str:
        """Take one; or say why not."""
        seq = self._seqs.get(snapshot.seq)
        if seq is None or seq.epoch != snapshot.epoch or seq.window is None or self._windows is None:
            return f"sequence {snapshot.seq} has no window in epoch {snapshot.epoch}"
        return seq.error or self._windows.snapshot(seq.window, snapshot.position, self._slot(snapshot.slot))

    def _restore(self, seq: _Seq, start: int | None) -> str:
        if start is None or self._windows is None:
            return "a snapshot is restored for the first item of a sequence of a model with windows"
        seq.window = self._windows.restore(start, self._slot(seq.opened.restore))
        return ""

    def _close(self, name: SeqId) -> None:
        seq = self._seqs.pop(name, None)
        if seq is not None and seq.window is not None and self._windows is not None:
            self._windows.close(seq.window, clear=bool(seq.error))

    def _clear_tainted(self, blocks: Sequence[int]) -> None:
        if tainted := self._tainted.intersection(blocks):
            self._kv.clear(tainted)
            self._tainted -= tainted

    def _why_not(self, opened: SeqOpen) -> str:
        vocab = self._config.vocab_size
        if not opened.tokens:
            return "it has no tokens"
        if min(opened.tokens) < 0 or max(opened.tokens) >= vocab:
            return f"it has a token outside the vocabulary of {vocab}"
        if any(not 0 <= token < vocab for token, _ in opened.sampling.logit_bias):
            return f"logit_bias names a token outside the vocabulary of {vocab}"
        return self._bad_blocks(opened.blocks)

    def _bad_blocks(self, blocks: Sequence[int]) -> str:
        bad = [block for block in blocks if not 0 <= block < self._kv.num_blocks]
        return f"block {bad[0]} is not one of {self._kv.num_blocks}" if bad else ""

    def _admit(self, item: WorkItem) -> _Work:
        seq = self._seqs.get(item.seq)
        if seq is None or seq.epoch != item.epoch:
            raise StepFailed([item.seq], f"sequence {item.seq} is not open in epoch {item.epoch}")
        if seq.error:
            raise StepFailed([item.seq], seq.error)
        if item.head_drafts:
            raise StepFailed([item.seq], "this executor has no draft head")
        known, end, drafts = seq.length, item.start + item.length, len(item.drafts)
        fits = end == known + drafts if item.samples else end < known and not drafts
        if not fits or not 0 <= item.start < min(end, known):
            why = f"positions {item.start}..{end} with {drafts} drafts do not fit {known} tokens"
            raise StepFailed([item.seq], why)
        if end > self._config.max_positions or end > len(seq.table) * self._kv.block_size:
            raise StepFailed([item.seq], f"position {end - 1} has no block, or is beyond the model's positions")
        if self._windows is not None:
            seq.window = seq.window or self._windows.open(item.start)
            if why := self._windows.why_not(seq.window, item.start):
                raise StepFailed([item.seq], why)
        tokens = seq.tokens[item.start : end]
        if item.drafts:
            # A draft outside the vocabulary is never accepted; any token stands in for it.
            vocab = self._config.vocab_size
            guesses = [draft if 0 <= draft < vocab else 0 for draft in item.drafts]
            tokens = np.concatenate((tokens, np.array(guesses, np.int64)))
        wanted = drafts + 1 if item.samples else 0
        return _Work(item, seq, Rows(tokens, item.start, item.write_from, seq.table, seq.window, wanted))

    def _compute(
        self, work: Sequence[_Work], masks: Callable[[], MaskRows] | None, failed: list[SeqFailure]
    ) -> tuple[SeqOutput, ...]:
        for one in work:
            if self._windows is not None and one.seq.window is not None:
                self._windows.reserve(one.seq.window, one.item.start + one.item.length)
        finite = self._model.compute([one.rows for one in work])
        allowed = _unpack(masks(), self._config.vocab_size) if masks is not None else {}
        rows = [row for one in work if one.item.samples for row in _rows(one, allowed.get(one.item.seq))]
        drawn = self._model.sample(rows) if rows else ()
        return self._conclude(work, finite, drawn, failed)

    def _conclude(
        self,
        work: Sequence[_Work],
        finite: Sequence[bool],
        drawn: Sequence[Drawn],
        failed: list[SeqFailure],
    ) -> tuple[SeqOutput, ...]:
        """Verify drafts and take the tokens; nothing after this can fail."""
        outputs: list[SeqOutput] = []
        at = 0
        for one, fine in zip(work, finite, strict=True):
            item = one.item
            own = drawn[at : at + len(item.drafts) + 1] if item.samples else ()
            at += len(own)
            if not fine:
                self._tainted.update(one.seq.table)
                one.seq.error = "the model's numbers are not finite"
                failed.append(SeqFailure(item.seq, one.seq.error))
                continue
            tokens: list[int] = []
            probs: list[TokenProbs] = []
            why = ""
            for position, result in enumerate(own):
                if why := result.failed:
                    break
                tokens.append(result.token)
                if result.probs is not None:
                    probs.append(result.probs)
                if position < len(item.drafts) and item.drafts[position] != result.token:
                    break
            if why:
                one.seq.error = why
                failed.append(SeqFailure(item.seq, why))
                continue
            one.seq.append(tokens)
            if self._windows is not None and one.seq.window is not None:
                # The last token that was sampled has no KV yet; neither has what follows a draft that was wrong.
                end = one.seq.length - 1 if item.samples else item.start + item.length
                self._windows.trim(one.seq.window, end)
            outputs.append(SeqOutput(item.seq, item.epoch, tuple(tokens), tuple(probs)))
        return tuple(outputs)


def _rows(one: _Work, allowed: NDArray[np.bool_] | None) -> list[Row]:
    """How the rows of one item that sample become tokens: row `d` follows the first `d` drafts."""
    opened, known = one.seq.opened, one.seq.length
    params = opened.sampling
    line = one.seq.tokens
    if one.item.drafts:
        line = np.concatenate((line, one.rows.tokens[len(one.rows.tokens) - len(one.item.drafts) :]))
    draws = params.temperature > 0
    rows = []
    for count in range(len(one.item.drafts) + 1):
        position = known + count
        key = stream_key(opened.seed, opened.choice, position, Purpose.SAMPLE) if draws else 0
        mask = allowed[count] if allowed is not None and count < len(allowed) else None
        rows.append(Row(params, key, line[:position], opened.prompt_len, mask))
    return rows


def _unpack(masks: MaskRows, vocab: int) -> dict[SeqId, NDArray[np.bool_]]:
    """Masks `[rows, vocab]` of each sequence."""
    packed = np.frombuffer(masks.bits, np.uint8).reshape(sum(masks.rows_per_seq), -1)
    bits = np.unpackbits(packed, axis=1, count=vocab, bitorder="little").astype(np.bool_)
    ends = np.cumsum(masks.rows_per_seq)
    return {seq: bits[end - count : end] for seq, count, end in zip(masks.seqs, masks.rows_per_seq, ends, strict=True)}
