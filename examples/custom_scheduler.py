"""A scheduler of your own in 12 lines: the newest request first. Run `python custom_scheduler.py`."""

import anyio

from deepinfra import Engine, GenerateRequest, Pool, SamplingParams, TextInput
from deepinfra.core.ids import SeqId
from deepinfra.core.step import Choice, Grant, Job, StepReport, StepView
from deepinfra.executors.torch import TorchExecutor
from deepinfra.interfaces import Scheduler
from deepinfra.recipes import ChatTemplate


class NewestFirst(Scheduler):
    waiting: tuple[SeqId, ...] = ()

    def add(self, job: Job) -> None:
        self.waiting += (job.seq,)

    def finish(self, seq: SeqId) -> None:
        self.waiting = tuple(each for each in self.waiting if each != seq)

    def plan(self, view: StepView) -> Choice:
        run = [(row.seq, row.todo) for row in view.running] + [(seq, 256) for seq in reversed(self.waiting)]
        return Choice(tuple(Grant(*grant) for grant in run), preempt=tuple(row.seq for row in view.running))

    def commit(self, report: StepReport) -> None:
        opened = {row.seq for row in report.rows if row.opened}
        self.waiting = tuple(seq for seq in self.waiting if seq not in opened) + report.preempted


async def main() -> None:
    """Serve two prompts at once with it."""
    engine = Engine(ChatTemplate("smollm2"), Pool(NewestFirst(), TorchExecutor("smollm2", num_blocks=256)))

    async def ask(text: str) -> None:
        request = GenerateRequest(
            input=TextInput(text), max_tokens=12, sampling=SamplingParams(temperature=0), ignore_eos=True
        )
        async with engine.generate(request) as stream:
            answer = "".join([getattr(event, "text", "") async for event in stream])
        print(f"{text}{answer!r}")

    async with engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "The capital of France is")
        tasks.start_soon(ask, "Once upon a time")


if __name__ == "__main__":
    anyio.run(main)
