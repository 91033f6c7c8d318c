"""The identifiers that cross boundaries: distinct types, so that a block number cannot pass for a sequence number."""

from __future__ import annotations

from typing import NewType

__all__ = ("BlockId", "BlockKey", "Epoch", "RequestId", "SeqId", "TokenId")

SeqId = NewType("SeqId", int)
"""A sequence inside one engine; never reused while the engine runs."""

Epoch = NewType("Epoch", int)
"""Counts how often a sequence was opened on an executor; outputs of an older epoch are dropped."""

BlockId = NewType("BlockId", int)
"""A block of device memory, `0 <= id < num_blocks`."""

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the SHA-256 chain over everything up to the end of a block; see `core.kv`."""

RequestId = NewType("RequestId", str)
"""A request at the edge, as logged and returned to the client."""

TokenId = int
"""A vocabulary index, `0 <= id < vocab_size`."""
