"""vLLM's CPU build as a side of a comparison, in the interpreter that has it."""

from __future__ import annotations

import time

from lines import answer_lines, options, own_output

_UNTIMED = 2
"""First steps in which all sequences decode; what is timed begins at the end of the last of them."""


def main() -> None:
    """Load a model's folder and answer. The engine runs in this process, where its steps can be seen."""
    wire, given = own_output(), options()
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=str(given["model"]),
        dtype="bfloat16",
        max_model_len=int(str(given["context"])),
        max_num_seqs=int(str(given["seqs"])),
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    engine, count = llm.llm_engine, iter(range(1 << 62))

    def add(prompt: list[int], new: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.add_request(str(next(count)), TokensPrompt(prompt_token_ids=prompt), params)

    def steps() -> list[tuple[float, dict[str, list[int]]]]:
        """Run to the end: after each step the time, and the ids so far of each sequence that grew."""
        found = []
        while engine.has_unfinished_requests():
            grown = {each.request_id: list(each.outputs[0].token_ids) for each in engine.step()}
            found.append((time.perf_counter(), grown))
        return found

    def prefill(prompt: list[int]) -> dict[str, object]:
        began = time.perf_counter()
        add(prompt, 1)
        return {"seconds": steps()[-1][0] - began}

    def decode(prompts: list[list[int]], new: int) -> dict[str, object]:
        firsts = []
        for prompt in prompts:  # what they hold comes from the prefix cache then
            add(prompt, 1)
            firsts.append(next(iter(steps()[-1][1].values()))[-1])
        for prompt in prompts:
            add(prompt, new)
        ends = [at for at, grown in steps() if len(grown) == len(prompts)]
        timed = len(ends) - _UNTIMED
        seconds = ends[-1] - ends[_UNTIMED - 1]
        return {"seconds": seconds, "tokens": timed * len(prompts), "firsts": firsts}

    answer_lines(wire, f"vLLM {vllm.__version__}", {"dtype": "bfloat16"}, {"prefill": prefill, "decode": decode})


if __name__ == "__main__":
    main()
