"""llama.cpp as a side of a comparison, through llama-cpp-python's low-level calls, in the interpreter that has it.

Tokens are numpy's argmax of the logits, which is faster than llama.cpp's own greedy sampler (that copies the vocabulary
for every row).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

import llama_cpp
import numpy as np
from lines import answer_lines, options, own_output

_UNTIMED = 2
"""First steps of a decode, in which memory is touched for the first time."""


class Row(NamedTuple):
    """One row of a batch: its token, its position, its sequence, and whether its logits are wanted."""

    token: int
    position: int
    seq: int
    wanted: bool


def rows_of(prompt: Sequence[int], seq: int) -> list[Row]:
    """A whole prompt, of which the last row's logits are wanted."""
    return [Row(token, at, seq, at == len(prompt) - 1) for at, token in enumerate(prompt)]


class Context:
    """A context as small as its sequences allow, each with cells of its own: attention walks over all of them."""

    def __init__(self, model: Any, vocab: int, threads: int, seqs: int, tokens: int) -> None:
        each = -(-tokens // 256) * 256
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = seqs * each, seqs, max(2048, tokens)
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._vocab = vocab
        self.prompts: list[list[int]] = []
        self.firsts: list[int] = []

    def run(self, rows: Sequence[Row]) -> list[int]:
        """Compute a batch; the likeliest next token of each row that wants logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = row.token, row.position, row.wanted
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row.seq
        if failed := llama_cpp.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode returned {failed}")
        shape = (sum(row.wanted for row in rows), self._vocab)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=shape)
        return [int(token) for token in logits.argmax(axis=1)]

    def cut(self, seq: int, tokens: int) -> None:
        """Forget what a sequence has behind so many tokens."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq, tokens, -1)

    def begin(self, prompts: list[list[int]]) -> list[int]:
        """First token of each prompt; the same prompts as last time are not computed again."""
        if prompts != self.prompts:
            for seq in range(len(self.prompts)):
                self.cut(seq, 0)
            self.firsts = [self.run(rows_of(prompt, seq))[0] for seq, prompt in enumerate(prompts)]
            self.prompts = prompts
        for seq, prompt in enumerate(prompts):
            self.cut(seq, len(prompt))
        return self.firsts


def serve(wire: TextIO, path: str, form: str, threads: int) -> None:
    """Load a GGUF file and answer."""
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot read {path}")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    made: dict[tuple[int, int], Context] = {}

    def context(seqs: int, tokens: int) -> Context:
        if (seqs, tokens) not in made:
            made[seqs, tokens] = Context(model, vocab, threads, seqs, tokens)
        return made[seqs, tokens]

    def prefill(prompt: list[int]) -> dict[str, object]:
        one = context(1, len(prompt) + 1)
        one.cut(0, 0)
        began = time.perf_counter()
        one.run(rows_of(prompt, 0))
        return {"seconds": time.perf_counter() - began}

    def decode(prompts: list[list[int]], new: int) -> dict[str, object]:
        length = len(prompts[0])
        many = context(len(prompts), length + new)
        firsts = tokens = many.begin(prompts)
        began = 0.0
        for step in range(new):
            if step == _UNTIMED:
                began = time.perf_counter()
            tokens = many.run([Row(token, length + step, seq, True) for seq, token in enumerate(tokens)])
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": len(prompts) * (new - _UNTIMED), "firsts": firsts}

    system = llama_cpp.llama_print_system_info().decode()
    name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
    answer_lines(wire, name, {"format": form, "system": system}, {"prefill": prefill, "decode": decode})


def requantise(path: str, into: str, form: str) -> None:
    """Write a GGUF file's weights in another of llama.cpp's formats."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
    params.allow_requantize = True
    if failed := llama_cpp.llama_model_quantize(path.encode(), into.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama_model_quantize returned {failed}")


def main() -> None:
    """Answer lines, or with `into` write a file."""
    wire, given = own_output(), options()
    path, form = str(given["model"]), str(given["form"])
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    if into := given.get("into"):
        requantise(path, str(into), form)
    else:
        serve(wire, path, form, int(str(given["threads"])))


if __name__ == "__main__":
    main()
