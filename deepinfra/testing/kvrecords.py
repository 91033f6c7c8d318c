"""Records for testing stores: their bytes follow from their refs, so every byte that comes back can be judged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import KVRecord, Namespace, RecordRef, Retention, block_keys, root_key
from deepinfra.interfaces.kvstore import KVStore

__all__ = ("NBYTES", "chain", "content", "keys_of", "load")

BLOCK_SIZE = 2

NBYTES = 3_000
"""Bytes of a record unless told otherwise."""

DEFAULT_RETENTION = Retention()


def content(ref: RecordRef) -> bytes:
    """The bytes that the kit saves under a ref: different for every key, kind and size."""
    return hashlib.shake_128(b"%d/%s/" % (ref.nbytes, ref.kind.encode()) + ref.key).digest(ref.nbytes)


def chain(
    *tokens: int,
    tenant: str = "public",
    model: str = "m",
    kind: Literal["block", "snapshot", "tail"] = "block",
    nbytes: int = NBYTES,
    retention: Retention = DEFAULT_RETENTION,
    salt: str = "",
) -> list[KVRecord]:
    """Records of all full blocks (of 2 tokens) of a sequence."""
    namespace = Namespace(weights=model, recipe="r", kv_dtype="u8", layout="l", tenant=tenant, salt=salt)
    root = root_key(namespace)
    keys = block_keys(root, tokens, BLOCK_SIZE)
    refs = [RecordRef(key, kind, nbytes) for key in keys]
    return [
        KVRecord(
            ref=ref,
            parent=parent,
            namespace=root,
            tenant=tenant,
            model=model,
            tokens=tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE],
            retention=retention,
            data=memoryview(content(ref)),
        )
        for i, (ref, parent) in enumerate(zip(refs, [root, *keys], strict=False))
    ]


def keys_of(records: Sequence[KVRecord]) -> list[BlockKey]:
    """Keys of records."""
    return [record.ref.key for record in records]


async def load(store: KVStore, refs: Sequence[RecordRef]) -> list[bytes]:
    """Leading records that a store delivers."""
    buffers = [bytearray(ref.nbytes) for ref in refs]
    loaded = await store.load(refs, [memoryview(buffer) for buffer in buffers])
    assert 0 <= loaded.count <= len(refs)
    assert (loaded.stopped == "") == (loaded.count == len(refs))
    return [bytes(buffer) for buffer in buffers[: loaded.count]]
