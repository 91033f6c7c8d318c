"""TorchExecutor: the Executor around a `Runner` on a thread; imports torch only when entered."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import anyio

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import KVGroup, KVLayout
from deepinfra.core.model import Computing, ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, StepPlan, StepResult
from deepinfra.errors import ConfigError, ExecutorError, ExecutorLost, UnsupportedModelError
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.machine import machine_kind
from deepinfra.executors.torch.plan import MemoryPlan, available_nbytes, check_fits, plan_memory, window_reach
from deepinfra.executors.torch.weights.headers import check_headers
from deepinfra.executors.torch.worker import Job, Worker
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle
from deepinfra.models import Model, open_model

if TYPE_CHECKING:
    from deepinfra.executors.torch.kv import PagedKV
    from deepinfra.executors.torch.runner import Runner

__all__ = ("TorchExecutor",)

Dtype = Literal["float32", "bfloat16"]

_ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2}


class _Step(StepHandle):
    def __init__(self, plan: StepPlan, worker: Worker, run: Callable[[StepPlan, Callable[[], MaskRows]], StepResult]):
        self._masks: MaskRows | None = None
        self._given = threading.Event()
        self._worker = worker
        self._job: Job[StepResult] = worker.post(lambda: run(plan, self._wait_for_masks))

    def masks(self, rows: MaskRows) -> None:
        self._masks = rows
        self._given.set()

    async def result(self) -> StepResult:
        return await self._job.wait()

    def _wait_for_masks(self) -> MaskRows:
        while not self._given.wait(0.05):
            if self._worker.leaving.is_set():
                raise ExecutorLost("the executor was left")
        assert self._masks is not None
        return self._masks


class _Memory(KVMemory):
    """Slots in one buffer; draining is work of the same thread, hence ordered with steps."""

    def __init__(self, buffer: memoryview, num_slots: int, stride: int, worker: Worker) -> None:
        self._buffer, self._num_slots, self._stride, self._worker = buffer, num_slots, stride, worker
        self._slots = [buffer[index * stride : (index + 1) * stride] for index in range(num_slots)]
        self.kv: PagedKV | None = None

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def slot(self, index: int) -> memoryview:
        return self._slots[index]

    async def drain(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        pairs = list(zip(blocks, slots, strict=True))
        job = self._worker.post(lambda: self._copy(pairs))
        with anyio.CancelScope(shield=True):  # who is cancelled may reuse its slots at once
            await job.wait()
        await anyio.lowlevel.checkpoint_if_cancelled()

    def _copy(self, pairs: Sequence[tuple[BlockId, int]]) -> None:
        assert self.kv is not None
        for block, slot in pairs:
            self.kv.drain(block, self._slots[slot])


class TorchExecutor(Executor):
    """Runs decoders (Llama, SmolLM, Mistral, Qwen2, Qwen3, Gemma 3, gpt-oss) with PyTorch on the CPU.

    The constructor reads the model's headers only and refuses, by name, whatever the model needs that is not
    implemented. Weights are read, and torch is imported, inside `async with`. Steps run on one thread of its own in the
    order submitted; a large one keeps every core of `threads` busy, so a server had better run it in a child process.

    Args:
        model: Name, hub id, folder or GGUF file; or a model already opened.
        dtype: Element type of weights, computation and KV. `auto` takes bfloat16 where the CPU multiplies it in
            hardware, else float32; see `explain`.
        num_blocks: Blocks of KV; `auto` sizes the pool from free memory, see `memory_plan`.
        block_size: Positions per block.
        max_step_tokens: Most positions per step.
        max_seqs: Most sequences at once.
        max_context: Most positions of a sequence; default: as many as the model was made for.
        threads: Threads of torch; default: torch's own choice, one per physical core.
        num_slots: Staging slots.

    Raises:
        ModelError: Files are missing, damaged or contradictory.
        UnsupportedModelError: The model has a field or tensor with an effect that is not implemented.
        ConfigError: A setting does not fit the model.
    """

    def __init__(
        self,
        model: str | Model,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        num_blocks: int | Literal["auto"] = "auto",
        block_size: int = 16,
        max_step_tokens: int = 512,
        max_seqs: int = 64,
        max_context: int | None = None,
        threads: int | None = None,
        num_slots: int = 32,
    ) -> None:
        self._model = open_model(model) if isinstance(model, str) else model
        self._config = decoder_config(self._model.config)
        check_headers(self._config, self._model.tensors)
        self._dtype, self._why_dtype = _choose_dtype(dtype)
        most = self._config.max_positions
        if max_context is not None and max_context > most:
            if self._config.rope.kind == "dynamic":
                raise UnsupportedModelError(
                    "rope_scaling.rope_type", "dynamic", f"depends on how a text is cut beyond {most} positions"
                )
            raise ConfigError(f"max_context {max_context} exceeds the model's {most} positions")
        self._num_blocks = None if num_blocks == "auto" else num_blocks
        self._block_size, self._max_step_tokens, self._max_seqs = block_size, max_step_tokens, max_seqs
        self._max_context = max_context or most
        self._threads, self._num_slots = threads, num_slots
        self._layout = _layout(self._config, self._dtype, block_size)
        self._staging: memoryview | None = None
        self._weights = ""
        self._plan: MemoryPlan | None = None

    @property
    def provides(self) -> frozenset[str]:
        """See `Executor.provides`."""
        return frozenset({"drafts", "logprobs", "masks", "sampling"})

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`. Payloads are `[layers, k|v, positions, kv_heads, head_dim]`.

        A block has the layers that see everything, a snapshot the last positions of the others. A model where every
        layer slides has blocks only: a mask hides what is too old.
        """
        return self._layout

    @property
    def identity(self) -> ExecutorIdentity:
        """See `Executor.identity`. Asked for outside `async with`, it reads every byte of the weights once.

        Raises:
            ResourceError: The model cannot fit, so that reading them would be for nothing.
        """
        if not self._weights:
            check_fits(self.memory_plan(), self._block_size)
            self._weights = self._model.fingerprint()
        return ExecutorIdentity(model=self._model.name, weights=self._weights, kv_dtype=self._dtype)

    @property
    def computing(self) -> Computing:
        """See `Executor.computing`."""
        library = f"torch {importlib.metadata.version('torch')}"
        return Computing(self._dtype, path="torch", library=library, machine=machine_kind())

    @property
    def speed(self) -> str:
        """See `Executor.speed`: the processor and the number of threads too."""
        threads = self._threads or f"auto of {os.cpu_count()}"
        return f"{super().speed} threads {threads} block {self._block_size} on {_processor()}"

    @property
    def limits(self) -> ExecutorLimits:
        """See `Executor.limits`."""
        if self._plan is None:
            raise ExecutorLost("the executor is not entered")
        return ExecutorLimits(
            max_step_tokens=self._max_step_tokens,
            max_seqs=self._max_seqs,
            max_context=min(self._max_context, self._plan.num_blocks * self._block_size),
            vocab_size=self._config.vocab_size,
            num_blocks=self._plan.num_blocks,
            num_slots=self._num_slots,
        )

    @property
    def memory(self) -> KVMemory:
        """See `Executor.memory`."""
        return self._memory

    @property
    def staging_nbytes(self) -> int:
        """Bytes of all staging slots."""
        return self._num_slots * self._layout.slot_nbytes

    def use_staging(self, buffer: memoryview) -> None:
        """See `Executor.use_staging`."""
        slots, rest = divmod(buffer.nbytes, self._layout.slot_nbytes)
        if rest or not slots:
            raise ExecutorError(f"{buffer.nbytes} bytes are no whole number of staging slots")
        self._staging, self._num_slots = buffer, slots

    def memory_plan(self) -> MemoryPlan:
        """What the model will take and how many blocks of KV it gets; from headers and free memory, now or at entry."""
        return self._plan or plan_memory(
            self._config,
            itemsize=_ITEMSIZE[self._dtype],
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_step_tokens=self._max_step_tokens,
            max_seqs=self._max_seqs,
            max_context=self._max_context,
            num_slots=self._num_slots,
            free_nbytes=available_nbytes(),
        )

    def explain(self) -> Mapping[str, str]:
        """See `Component.explain`."""
        plan = self.memory_plan()
        return {
            "dtype": f"{self._dtype}: {self._why_dtype}",
            "num_blocks": f"{plan.num_blocks}: {plan.why}",
            "max_context": str(min(self._max_context, plan.num_blocks * self._block_size)),
            "memory": str(plan),
        }

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        plan = self.memory_plan()
        check_fits(plan, self._block_size)
        buffer = self._staging if self._staging is not None else memoryview(bytearray(self.staging_nbytes))
        worker = Worker("deepinfra-torch")
        try:
            memory = _Memory(buffer, self._num_slots, self._layout.slot_nbytes, worker)
            self._run = await worker.post(lambda: self._load(plan, memory, worker)).wait()
            self._plan, self._memory, self._worker = plan, memory, worker
            yield self
        finally:
            await worker.close()
            self._plan = None
            for name in ("_run", "_memory", "_worker"):
                self.__dict__.pop(name, None)

    def submit(self, plan: StepPlan) -> StepHandle:
        """See `Executor.submit`."""
        return _Step(plan, self._worker, self._run)

    def _load(
        self, plan: MemoryPlan, memory: _Memory, worker: Worker
    ) -> Callable[[StepPlan, Callable[[], MaskRows]], StepResult]:
        """Read the weights; on the worker's thread, where torch keeps its settings."""
        from deepinfra.executors.torch.load import load

        def checkpoint() -> None:
            if worker.leaving.is_set():
                raise ExecutorLost("the executor was left while it read its weights")

        if not self._weights:
            self._weights = self._model.fingerprint()
        runner: Runner
        runner, memory.kv = load(
            self._model.tensors,
            self._config,
            dtype=self._dtype,
            num_blocks=plan.num_blocks,
            num_pages=plan.num_pages,
            block_size=self._block_size,
            threads=self._threads,
            slot=memory.slot,
            now=self.clock.now,
            checkpoint=checkpoint,
        )
        return runner.run


def _layout(config: DecoderConfig, dtype: Dtype, block_size: int) -> KVLayout:
    itemsize = _ITEMSIZE[dtype]
    layer = config.layer_nbytes_per_token(itemsize)
    paged, sliding, window = config.paged, config.sliding, config.window
    groups = [KVGroup(name="attention", kind="full", layers=paged, nbytes_per_token=len(paged) * layer)]
    if sliding:
        nbytes = len(sliding) * layer
        groups.append(KVGroup(name="window", kind="window", layers=sliding, nbytes_per_token=nbytes, window=window))
    return KVLayout(
        block_size=block_size,
        block_nbytes=len(paged) * layer * block_size,
        dtype=dtype,
        groups=tuple(groups),
        snapshot_nbytes=window * len(sliding) * layer,
        snapshot_reach=window_reach(block_size) if sliding else 0,
    )


def _processor() -> str:
    """The processor's name, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(names, platform.machine())


def _choose_dtype(wanted: Literal["auto", "float32", "bfloat16"]) -> tuple[Dtype, str]:
    if wanted != "auto":
        return wanted, "as configured"
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    for flag in ("amx_bf16", "avx512_bf16", "bf16"):  # the last is Arm's
        if flag in flags:
            return "bfloat16", f"this CPU multiplies bfloat16 in hardware ({flag})"
    return "float32", "this CPU does not multiply bfloat16 in hardware, where it would be slower than float32"
