"""How much memory a model takes and how many blocks of KV fit: plain sums, without torch, before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepinfra.core.kv import FRAME_NBYTES
from deepinfra.errors import ResourceError
from deepinfra.executors.torch.decoder import DecoderConfig

__all__ = (
    "MemoryPlan",
    "available_nbytes",
    "check_fits",
    "dense_nbytes",
    "plan_memory",
    "window_pages",
    "window_reach",
)

_KV_CAP = 4 * 2**30
"""Bytes of KV that `auto` never exceeds: a laptop's owner wants the rest of the memory for other programs."""


_PARTIALS = 4 * 2**20
"""Bytes of parts of attention that the kernels keep for each KV head."""

_DRAFTS = 32
"""The most drafts that a speculator of ours gives in one step."""


def window_reach(block_size: int) -> int:
    """Positions that windows keep beyond what layers see, so that a snapshot can be taken that far back."""
    return 2 * block_size + _DRAFTS


def window_pages(config: DecoderConfig, block_size: int, max_seqs: int, max_step_tokens: int, max_context: int) -> int:
    """Pages that are enough for `max_seqs` sequences and any step; 0 if no layer has a window of its own.

    Between steps a sequence holds what its window and the reach touch; within one, the step's rows too.
    """
    if not config.sliding:
        return 0
    kept = -(-min(config.window + window_reach(block_size), max_context) // block_size) + 1
    return max_seqs * (kept + 1) + -(-max_step_tokens // block_size)


class MemoryPlan(NamedTuple):
    """What a model will take, in bytes, and what decided the number of blocks (`why`)."""

    weights_nbytes: int
    workspace_nbytes: int
    staging_nbytes: int
    kv_nbytes_per_token: int
    block_nbytes: int
    num_blocks: int
    free_nbytes: int
    why: str
    num_pages: int
    windows_nbytes: int

    @property
    def kv_nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_nbytes

    @property
    def total_nbytes(self) -> int:
        """Everything together."""
        parts = (self.weights_nbytes, self.workspace_nbytes, self.staging_nbytes, self.kv_nbytes, self.windows_nbytes)
        return sum(parts)

    def __str__(self) -> str:
        windows = f"windows {_mib(self.windows_nbytes)} + " if self.windows_nbytes else ""
        return (
            f"weights {_mib(self.weights_nbytes)} + KV {_mib(self.kv_nbytes)} ({self.num_blocks} blocks, "
            f"{self.kv_nbytes_per_token / 1024:g} KiB a token; {self.why}) + {windows}"
            f"staging {_mib(self.staging_nbytes)} + workspace {_mib(self.workspace_nbytes)} = "
            f"{_mib(self.total_nbytes)} of {_mib(self.free_nbytes)} free"
        )


def plan_memory(
    config: DecoderConfig,
    *,
    weights_nbytes: int,
    kernels: bool,
    itemsize: int,
    num_blocks: int | None,
    block_size: int,
    max_step_tokens: int,
    max_seqs: int,
    max_context: int,
    num_slots: int,
    free_nbytes: int,
) -> MemoryPlan:
    """Sum up what a model takes.

    Without `num_blocks` the pool gets half of what is free after weights, workspace and staging, but no more than 4 GiB
    and no more than `max_seqs` sequences of `max_context` positions could use.

    Args:
        config: The model.
        weights_nbytes: Bytes of its weights as they are held.
        kernels: Those of deepinfra-kernels compute, not torch's.
        itemsize: Bytes of an element of KV, and of activations.
        num_blocks: A fixed size of the pool, or `None` for `auto`.
        block_size: Positions per block.
        max_step_tokens: Most rows of a step; they decide the workspace, as each may want logits.
        max_seqs: Most sequences.
        max_context: Most positions of a sequence.
        num_slots: Staging slots.
        free_nbytes: From `available_nbytes`.
    """
    weights = weights_nbytes
    rows, context = max_step_tokens, max_context
    workspace = _kernel_workspace(config, rows) if kernels else _workspace(config, itemsize, rows, context)
    workspace += rows * config.vocab_size * (4 if kernels else 4 + itemsize)  # drafts and scores want all logits
    per_token = config.kv_nbytes_per_token(itemsize)
    block = per_token * block_size
    window_token = len(config.sliding) * config.layer_nbytes_per_token(itemsize)
    pages = window_pages(config, block_size, max_seqs, max_step_tokens, max_context)
    windows = pages * block_size * window_token
    staging = num_slots * (FRAME_NBYTES + max(block, config.window * window_token))
    why = "as configured"
    if num_blocks is None:
        useful = max_seqs * -(-max_context // block_size)
        room = {
            f"{max_seqs} sequences of {max_context} tokens": useful,
            f"at most {_mib(_KV_CAP)}": _KV_CAP // block,
            "half of the memory left": max(0, free_nbytes - weights - workspace - staging - windows) // 2 // block,
        }
        why, num_blocks = min(room.items(), key=lambda pair: pair[1])
    return MemoryPlan(weights, workspace, staging, per_token, block, num_blocks, free_nbytes, why, pages, windows)


def _workspace(config: DecoderConfig, itemsize: int, rows: int, context: int) -> int:
    """One layer's activations, and scores of one tile of 128 queries in float32 and in the element type."""
    row = (
        4 * config.hidden_size
        + 3 * config.intermediate_size
        + 4 * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    )
    return rows * row * itemsize + 128 * config.num_heads * min(context, 32_768) * (4 + itemsize)


def _kernel_workspace(config: DecoderConfig, rows: int) -> int:
    """Rows between products in float32, the rows that go into products in up to three forms, parts of attention."""
    width, turned = config.num_heads * config.head_dim, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = max(config.hidden_size, config.intermediate_size, width)
    row = 2 * config.hidden_size + turned + width + config.intermediate_size + config.head_dim + 3 * widest
    return 4 * rows * row + config.num_kv_heads * _PARTIALS


def dense_nbytes(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of all weights as torch holds them."""
    elements = sum(_product(shape) for shape in config.shapes().values())
    # A tied output projection is kept a second time, packed for the matrix unit; the embedding is looked up by row.
    packed_head = config.vocab_size * config.hidden_size if config.tied and itemsize == 2 else 0
    return (elements + packed_head) * itemsize


def check_fits(plan: MemoryPlan, block_size: int) -> None:
    """Refuse what cannot fit.

    Raises:
        ResourceError: The sum exceeds what is free, or fewer than 16 tokens' blocks are left; carries the sum.
    """
    if plan.total_nbytes > plan.free_nbytes or plan.num_blocks * block_size < 16:
        raise ResourceError(f"the model does not fit into memory: {plan}; choose a smaller model or fewer blocks")


def available_nbytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: the kernel's `MemAvailable`, or less where a control group limits it.

    Version 2 groups are walked from this process's own up to the root; in version 1 the memory controller's are. File
    pages that a group can give back count as available.
    """
    free = _meminfo(proc / "meminfo")
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            free = min(free, *_group_room(cgroup, path, "memory.max", "memory.current", "inactive_file"), free)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free = min(free, *_group_room(cgroup / "memory", path, *names), free)
    return max(0, free)


def _group_room(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Sequence[int]:
    room: list[int] = []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
        if not most.isdigit() or not used.isdigit():  # "max", or no such file
            continue
        stat = dict(line.rpartition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
        room.append(int(most) - int(used) + int(stat.get(reclaimable, "0")))
    return room


def _meminfo(path: Path) -> int:
    for line in _read(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ResourceError(f"{path} does not say how much memory is available; give num_blocks as a number")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
