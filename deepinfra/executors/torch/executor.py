"""TorchExecutor: the Executor around a `Runner` on a thread; imports torch only when entered."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, Self

from deepinfra.core.kv import KVLayout
from deepinfra.core.model import Computing, ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, StepPlan, StepResult
from deepinfra.errors import ConfigError, ExecutorError, ExecutorLost, UnsupportedModelError
from deepinfra.executors.torch.choice import Choice, Kernels, WeightForm, choose, invariant, numerics, packed_nbytes
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.layout import ITEMSIZE, layout_of
from deepinfra.executors.torch.machine import choose_dtype, machine_kind, processor, usable_cores
from deepinfra.executors.torch.plan import MemoryPlan, available_nbytes, check_fits, dense_nbytes, plan_memory
from deepinfra.executors.torch.runner import Runner
from deepinfra.executors.torch.staging import Staging
from deepinfra.executors.torch.weights.headers import check_headers
from deepinfra.executors.torch.worker import Job, Worker
from deepinfra.interfaces.executor import Executor, KVMemory, StepHandle
from deepinfra.models import Model, open_model

if TYPE_CHECKING:
    import numpy as np
    from deepinfra_kernels.library import Library
    from numpy.typing import NDArray

    from deepinfra.executors.torch.blocks import KVBlocks
    from deepinfra.executors.torch.rows import StepModel
    from deepinfra.executors.torch.windows import Windows

__all__ = ("TorchExecutor",)


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


class TorchExecutor(Executor):
    """Runs decoders (Llama, SmolLM, Mistral, Qwen2, Qwen3, Gemma 3, gpt-oss) on the CPU: by kernels, or by PyTorch.

    The constructor reads the model's headers only and refuses, by name, whatever the model needs that is not
    implemented. Weights are read, and torch is imported if it computes, inside `async with`. Steps run on one thread of
    its own in the order submitted. Where torch computes, a server had better run it in a child process
    (`holds_interpreter`).

    Args:
        model: Name, hub id, folder or GGUF file; or a model already opened.
        dtype: Element type of KV, of weights that are not stored in blocks, and in which activations are multiplied
            with these. `auto` takes bfloat16 where the CPU multiplies it in hardware, else float32; see `explain`.
        num_blocks: Blocks of KV; `auto` sizes the pool from free memory, see `memory_plan`.
        block_size: Positions per block.
        max_step_tokens: Most positions per step.
        max_seqs: Most sequences at once.
        max_context: Most positions of a sequence; default: as many as the model was made for.
        threads: Threads that compute; default: one per physical core.
        num_slots: Staging slots.
        kernels: Whose operations compute: a path of deepinfra-kernels, or torch. `auto` takes the best path that this
            CPU, the model and the compiler allow, and warns once, on entry, if that is torch.
        weights: `stored` multiplies matrices in block formats (GGUF) as they are, with activations rounded to integers
            of 8 bits; `dense` decodes them to `dtype`. `auto` takes `stored` where kernels can. KV of one form is
            never taken for that of the other.
        batch_invariant: Promise that a sequence's logits do not depend, to the bit, on what else is computed, on how
            its prompt is cut, on what of it was cached, on drafts or on threads. All kernels keep that; torch does not,
            and is refused. KV is never shared with another mode, path, form of weights or version of the kernels.

    Raises:
        ModelError: Files are missing, damaged or contradictory.
        UnsupportedModelError: The model has a field or tensor with an effect that is not implemented.
        ConfigError: A setting does not fit the model.
    """

    depth = 2

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
        kernels: Kernels = "auto",
        weights: WeightForm = "auto",
        batch_invariant: bool = False,
    ) -> None:
        self._model = open_model(model) if isinstance(model, str) else model
        self._config = decoder_config(self._model.config)
        check_headers(self._config, self._model.tensors)
        self._dtype, self._why_dtype = choose_dtype(dtype)
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
        self._layout = layout_of(self._config, self._dtype, block_size)
        self._choice = choose(self._config, self._model.tensors, kernels, weights)
        if batch_invariant:
            self._choice = invariant(self._choice)
        self._numerics = numerics(self._choice, self._config)
        self._library: Library | None = None
        self._staging: memoryview | None = None
        self._weights = ""
        self._plan: MemoryPlan | None = None

    @property
    def holds_interpreter(self) -> bool:
        """See `Executor.holds_interpreter`: a step of the kernels is one call, one of torch's 400 short ones."""
        return not self._choice.paths

    @property
    def provides(self) -> frozenset[str]:
        """See `Executor.provides`."""
        always = frozenset({"drafts", "logprobs", "masks", "sampling"})
        return always | {"batch-invariant"} if self._choice.invariant else always

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

        If kernels cannot be built and torch computes instead, it says so inside.

        Raises:
            ResourceError: The model cannot fit, so that reading them would be for nothing.
        """
        if not self._weights:
            check_fits(self.memory_plan(), self._block_size)
            self._weights = self._model.fingerprint()
        return ExecutorIdentity(self._model.name, self._weights, self._dtype, self._numerics)

    @property
    def computing(self) -> Computing:
        """See `Executor.computing`."""
        if self._library is None:
            path, kernels, library = "torch", "", f"torch {importlib.metadata.version('torch')}"
        else:
            path, kernels, library = self._library.path, self._library.fingerprint, ""
        return Computing(self._dtype, self._choice.weights, path, kernels, library, machine_kind())

    @property
    def speed(self) -> str:
        """See `Executor.speed`: the kernels, the form of the weights, the processor and the number of threads too."""
        threads = self._threads or usable_cores()
        how = f"{self._choice.path} weights {self._choice.weights} threads {threads} block {self._block_size}"
        return f"{super().speed} kernels {how} on {processor()}"

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
        if self._plan is not None:
            return self._plan
        itemsize = ITEMSIZE[self._dtype]
        if self._choice.paths:
            stored = self._choice.stored
            weights = packed_nbytes(self._config, self._model.tensors, stored=stored, itemsize=itemsize)
        else:
            weights = dense_nbytes(self._config, itemsize)
        return plan_memory(
            self._config,
            weights_nbytes=weights,
            kernels=bool(self._choice.paths),
            itemsize=itemsize,
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
            "kernels": f"{self._choice.path}: {self._choice.why_path}",
            "weights": f"{self._choice.weights}: {self._choice.why_weights}",
            "numerics": self._numerics,
            "threads": str(self._threads or usable_cores()),
            "num_blocks": f"{plan.num_blocks}: {plan.why}",
            "max_context": str(min(self._max_context, plan.num_blocks * self._block_size)),
            "memory": str(plan),
        }

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        check_fits(self.memory_plan(), self._block_size)
        buffer = self._staging if self._staging is not None else memoryview(bytearray(self.staging_nbytes))
        chosen, worker = self._choice, Worker("deepinfra-torch")
        try:
            self._library, self._choice = await worker.post(self._open_library).wait()
            self._numerics = numerics(self._choice, self._config)
            plan = self.memory_plan()
            check_fits(plan, self._block_size)
            memory = Staging(buffer, self._num_slots, self._layout.slot_nbytes, worker)
            self._runner = await worker.post(lambda: self._load(plan, memory, worker)).wait()
            self._plan, self._memory, self._worker = plan, memory, worker
            yield self
        finally:
            await worker.close()
            self._plan = self._library = None
            self._choice, self._numerics = chosen, numerics(chosen, self._config)
            for name in ("_runner", "_memory", "_worker"):
                self.__dict__.pop(name, None)

    def submit(self, plan: StepPlan) -> StepHandle:
        """See `Executor.submit`."""
        return _Step(plan, self._worker, self._runner.run)

    async def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits `[tokens, vocab]` of a text from position 0 on; for measuring, while no sequence is open.

        They are valid until the next call, and computed in one step: no more tokens than `max_step_tokens`.

        Raises:
            ExecutorError: A sequence is open, the model has windows, or the text does not fit.
        """
        if len(tokens) > self._max_step_tokens:
            raise ExecutorError(f"a text of {len(tokens)} tokens does not fit into max_step_tokens")
        return await self._worker.post(lambda: self._runner.score(tokens)).wait()

    async def parts(self) -> Mapping[str, float]:
        """Seconds of each part of the last step; nothing where torch computes."""
        return await self._worker.post(self._runner.parts).wait()

    def _open_library(self) -> tuple[Library | None, Choice]:
        from deepinfra.executors.torch.library import open_library

        return open_library(self._choice)

    def _load(self, plan: MemoryPlan, memory: Staging, worker: Worker) -> Runner:
        """Read the weights; on the worker's thread, which is the one that will compute."""

        def checkpoint() -> None:
            if worker.leaving.is_set():
                raise ExecutorLost("the executor was left while it read its weights")

        if not self._weights:
            self._weights = self._model.fingerprint()
        kv: KVBlocks
        model: StepModel
        windows: Windows | None = None
        if self._library is not None:
            from deepinfra.executors.torch.native import load_native

            model, kv = load_native(
                self._library,
                self._model.tensors,
                self._config,
                dtype=self._dtype,
                stored=self._choice.stored,
                num_blocks=plan.num_blocks,
                block_size=self._block_size,
                threads=self._threads or usable_cores(),
                max_rows=self._max_step_tokens,
                checkpoint=checkpoint,
            )
        else:
            try:
                from deepinfra.executors.torch.eager import load_eager
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                why = f"torch computes here ({self._choice.why_path}) and is not installed"
                raise ConfigError(f"{why}: install deepinfra-serve[torch]") from None

            model, kv, windows = load_eager(
                self._model.tensors,
                self._config,
                dtype=self._dtype,
                num_blocks=plan.num_blocks,
                num_pages=plan.num_pages,
                block_size=self._block_size,
                threads=self._threads,
                checkpoint=checkpoint,
            )
        memory.kv = kv
        return Runner(model, self._config, kv, windows, memory.slot, self.clock.now)
