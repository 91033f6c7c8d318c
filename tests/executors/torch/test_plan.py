"""The sum of memory, and what `auto` takes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfra.errors import ResourceError
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.config import decoder_config
from deepinfra.executors.torch.plan import MemoryPlan, available_nbytes, dense_nbytes, plan_memory

GIB = 2**30
CONFIG = decoder_config(
    {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)


def plan(**changes: Any) -> MemoryPlan:
    settings: dict[str, Any] = {
        "weights_nbytes": dense_nbytes(CONFIG, 2),
        "kernels": False,
        "itemsize": 2,
        "num_blocks": None,
        "block_size": 16,
        "max_step_tokens": 512,
        "max_seqs": 64,
        "max_context": 8192,
        "num_slots": 8,
        "free_nbytes": 20 * GIB,
    }
    return plan_memory(CONFIG, **{**settings, **changes})


def test_the_sum_is_that_of_the_tensors() -> None:
    sums = plan()
    assert sums.weights_nbytes == 2 * (134_515_008 + 49152 * 576)
    assert sums.kv_nbytes_per_token == 2 * 30 * 3 * 64 * 2
    assert sums.total_nbytes > sums.weights_nbytes + sums.num_blocks * sums.block_nbytes


@pytest.mark.parametrize("free", [GIB, 3 * GIB, 8 * GIB, 64 * GIB])
def test_auto_never_takes_more_than_half_of_what_weights_leave(free: int) -> None:
    sums = plan(free_nbytes=free)
    assert 0 < sums.kv_nbytes <= (free - sums.weights_nbytes) / 2
    assert sums.kv_nbytes <= 4 * GIB


def test_auto_takes_no_more_than_its_sequences_can_use() -> None:
    assert plan(max_seqs=2, max_context=100).num_blocks == 2 * 7


@pytest.mark.parametrize("kernels", [True, False])
def test_logits_of_every_row_of_a_step_are_in_the_sum(kernels: bool) -> None:
    """Drafts of a few sequences, or a text that is scored, want as many as a step has rows."""
    most = 512 * 49152 * (4 if kernels else 6)
    sums = plan(kernels=kernels, max_seqs=1)
    assert sums.workspace_nbytes > most
    assert sums.workspace_nbytes == plan(kernels=kernels, max_seqs=64).workspace_nbytes
    assert plan(kernels=kernels, max_step_tokens=64).workspace_nbytes < sums.workspace_nbytes - most * 7 / 8


async def test_what_is_scored_takes_no_more_than_the_sum_has(smollm2_path: Path) -> None:
    executor = TorchExecutor(str(smollm2_path), num_blocks=40, max_seqs=1, max_step_tokens=256, threads=1)
    async with executor:
        logits = await executor.score(range(256))
        assert executor.memory_plan().workspace_nbytes > logits.nbytes


async def test_what_cannot_fit_is_refused_before_weights_are_read(made: Any) -> None:
    executor = TorchExecutor(str(made("llama")[0]), num_blocks=10**12)
    with pytest.raises(ResourceError, match="does not fit"):
        async with executor:
            pass
    with pytest.raises(ResourceError, match="does not fit"):
        _ = executor.identity  # which would read every byte for a fingerprint


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_group_of_version_two_limits_what_is_free(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "sys/a/memory.max": "1000000\n",
            "sys/a/memory.current": "600000\n",
            "sys/a/memory.stat": "anon 1\ninactive_file 100000\n",
            "sys/a/b/memory.max": "max\n",
            "sys/a/b/memory.current": "600000\n",
        },
    )
    assert available_nbytes(tmp_path / "proc", tmp_path / "sys") == 500_000


def test_a_group_of_version_one_limits_what_is_free(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 8000000 kB\n",
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n",
            "sys/memory/memory.limit_in_bytes": "700000\n",
            "sys/memory/memory.usage_in_bytes": "200000\n",
            "sys/memory/memory.stat": "total_inactive_file 50000\n",
        },
    )
    assert available_nbytes(tmp_path / "proc", tmp_path / "sys") == 550_000


def test_without_groups_the_kernel_decides(tmp_path: Path) -> None:
    files(tmp_path, {"proc/meminfo": "MemAvailable: 8000 kB\n"})
    assert available_nbytes(tmp_path / "proc", tmp_path / "sys") == 8000 * 1024
