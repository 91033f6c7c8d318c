"""How a decoder's KV is kept, as the engine sees it."""

from __future__ import annotations

from deepinfra.core.kv import KVGroup, KVLayout
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.plan import window_reach

__all__ = ("ITEMSIZE", "layout_of")

ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2}


def layout_of(config: DecoderConfig, dtype: str, block_size: int) -> KVLayout:
    """Blocks of the layers that see everything, windows of the others."""
    itemsize = ITEMSIZE[dtype]
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
