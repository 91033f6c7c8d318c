"""The least that an executor needs around it: blocks, sequences and plans. What executors are tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfra.core.ids import BlockId, Epoch, SeqId
from deepinfra.core.sampling import SamplingParams
from deepinfra.core.step import Fill, SeqOpen, SeqOutput, Snapshot, StepPlan, StepResult, TokenProbs, WorkItem
from deepinfra.engine.windows import ReplayMode, window_plan
from deepinfra.interfaces.executor import Executor

__all__ = ("GREEDY", "Host", "Line")

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Line:
    """A sequence as its host keeps it.

    Attributes:
        tokens: Prompt, then what was generated.
        blocks: Its block table; the first `shared` of them are published, to read only.
        done: Positions whose KV is in the blocks.
        behind: How many of these are computed again first, for the windows' sake.
        restore: Staging slot with its windows at its first row; -1 for none.
        loaded: Copies to be made before its first step.
        probs: One entry per generated token, if it asked for logprobs.
    """

    seq: SeqId
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    choice: int = 0
    epoch: Epoch = Epoch(0)
    blocks: list[BlockId] = field(default_factory=list)
    shared: int = 0
    done: int = 0
    behind: int = 0
    restore: int = -1
    loaded: list[Fill] = field(default_factory=list)
    open: bool = False
    probs: list[TokenProbs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """What was generated."""
        return self.tokens[self.prompt_len :]


class Host:
    """Plays the engine for one entered executor.

    Plans are correct by construction: sequences are opened once per epoch, blocks have one writer, positions are
    computed in order. Choose the order and the size of the work; everything else follows. Behind published or filled
    blocks an executor with windows gets rows to replay, or a snapshot.

    Args:
        executor: Entered.
        replay: How windows are rebuilt.
    """

    def __init__(self, executor: Executor, replay: ReplayMode = "exact") -> None:
        self.executor = executor
        self.windows = window_plan(executor.layout, replay, executor.limits.grid)
        self.block_size = executor.layout.block_size
        self.free = [BlockId(block) for block in range(executor.limits.num_blocks)]
        self._closed: list[Line] = []
        self._snapshots: list[Snapshot] = []
        self._seqs = 0
        self._steps = 0

    def line(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        choice: int = 0,
        published: Sequence[BlockId] = (),
        slots: Sequence[int] = (),
        restore: tuple[int, int] | None = None,
    ) -> Line:
        """A new sequence, opened by its first step.

        Args:
            prompt: Its tokens.
            sampling: How its tokens are drawn.
            seed: Of its draws.
            choice: Of its draws.
            published: Blocks of other sequences that hold the beginning of `prompt`.
            slots: Staging slots that hold the blocks behind those.
            restore: Staging slot that holds a snapshot, and its position: it begins there.
        """
        self._seqs += 1
        line = Line(SeqId(self._seqs), list(prompt), len(prompt), sampling, seed, choice)
        line.blocks, line.shared = list(published), len(published)
        self._load(line, slots, restore)
        return line

    def close(self, line: Line, *, keep: bool = False) -> None:
        """End a sequence with the next step; its own blocks are free then, unless `keep` leaves them to the caller."""
        if line.open:
            self._closed.append(line)
        if not keep:
            self.free += line.blocks[line.shared :]
        line.open = False

    def snapshot(self, line: Line, position: int, slot: int) -> None:
        """Take a snapshot of an open sequence with the next step."""
        self._snapshots.append(Snapshot(line.seq, line.epoch, position, slot))

    def preempt(self, line: Line, slots: Sequence[int] = ()) -> None:
        """Take a sequence's blocks; it is opened again in its next epoch, beginning with what `slots` hold."""
        self.close(line)
        line.epoch = Epoch(line.epoch + 1)
        line.blocks, line.shared, line.done, line.loaded = [], 0, 0, []
        self._load(line, slots, None)

    def work(self, line: Line, limit: int, drafts: Sequence[int] = ()) -> WorkItem:
        """At most `limit` positions that lack KV, and drafts behind them if the last token is among them."""
        # A full hit computes its last row again, without writing it.
        start = min(line.done - line.behind, len(line.tokens) - 1)
        known = min(limit, len(line.tokens) - start)
        samples = start + known == len(line.tokens)
        guesses = tuple(drafts) if samples else ()
        end = start + known + len(guesses)
        need = -(-end // self.block_size) - len(line.blocks)
        new = tuple(self.free.pop(0) for _ in range(need))
        return WorkItem(line.seq, line.epoch, start, end - start, line.done, samples, new, guesses)

    def plan(self, work: Sequence[tuple[Line, WorkItem]]) -> StepPlan:
        """The step that does this work, opens and fills what has to be, and closes what was closed."""
        opened, fills = [], []
        for line, _ in work:
            if not line.open:
                opened.append(
                    SeqOpen(
                        line.seq,
                        line.epoch,
                        tuple(line.tokens),
                        line.prompt_len,
                        tuple(line.blocks),
                        line.seed,
                        line.choice,
                        line.sampling,
                        line.restore,
                    )
                )
                fills += line.loaded
                line.open = True
        closed, snapshots = tuple(line.seq for line in self._closed), tuple(self._snapshots)
        self._closed.clear()
        self._snapshots.clear()
        self._steps += 1
        items = tuple(item for _, item in work)
        return StepPlan(self._steps, items, tuple(opened), closed, tuple(fills), snapshots=snapshots)

    def commit(self, work: Sequence[tuple[Line, WorkItem]], result: StepResult) -> None:
        """Take a step's outputs into the sequences; every one of them must be there."""
        assert not result.failed, f"rows failed: {result.failed}"
        outputs = {output.seq: output for output in result.outputs}
        assert len(outputs) == len(result.outputs) == len(work), f"outputs of {sorted(outputs)} for {len(work)} items"
        for line, item in work:
            self._take(line, item, outputs[line.seq])

    async def step(self, *work: tuple[Line, WorkItem]) -> StepResult:
        """Run one step and take its outputs."""
        plan = self.plan(work)
        result = await self.executor.submit(plan).result()
        assert result.step == plan.step, f"result of step {result.step} for step {plan.step}"
        assert result.seconds >= 0.0, "a step took negative time"
        self.commit(work, result)
        return result

    async def generate(self, line: Line, new: int, *, chunk: int | None = None) -> list[int]:
        """Run one sequence alone until it has `new` tokens, `chunk` positions at a time; returns them."""
        limit = min(chunk or self.executor.limits.max_step_tokens, self.executor.limits.max_step_tokens)
        while len(line.output) < new:
            await self.step((line, self.work(line, limit)))
        return line.output[:new]

    def _load(self, line: Line, slots: Sequence[int], restore: tuple[int, int] | None) -> None:
        blocks = [self.free.pop(0) for _ in slots]
        line.blocks += blocks
        line.loaded = [Fill(slot, block) for slot, block in zip(slots, blocks, strict=True)]
        line.done = len(line.blocks) * self.block_size
        line.restore, start = restore or (-1, self.windows.first_row(line.done, len(line.tokens)))
        # Without windows only the last row of a full hit is computed again, and that as long as it is the last.
        line.behind = line.done - start if self.windows.rows else 0

    def _take(self, line: Line, item: WorkItem, output: SeqOutput) -> None:
        assert output.epoch == line.epoch, f"output of epoch {output.epoch} in epoch {line.epoch}"
        count = len(output.tokens)
        if not item.samples:
            assert not count, "a chunk that does not sample gave tokens"
        else:
            assert 1 <= count <= len(item.drafts) + 1, f"{count} tokens for {len(item.drafts)} drafts"
            assert output.tokens[:-1] == item.drafts[: count - 1], "an accepted draft is not the draft"
        if line.sampling.logprobs is not None:
            assert len(output.probs) == count, f"{len(output.probs)} logprobs for {count} tokens"
        line.blocks += item.blocks
        line.tokens += output.tokens
        line.probs += output.probs
        line.behind = max(0, line.done - item.start - item.length)
        # The last sampled token has no KV yet; rejected drafts are not to be counted.
        line.done = max(line.done, len(line.tokens) - 1 if item.samples else item.start + item.length)
