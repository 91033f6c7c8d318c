"""Looking a prompt's blocks up in a folder, expired and damaged ones and those of other owners too. Blocking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import FRAME_NBYTES, KVLayout, Namespace, TierHit, block_keys, namespace_digest
from deepinfra.engine.explain import Miss, shared
from deepinfra.engine.windows import WindowPlan
from deepinfra.kvstores.ssd.census import Census
from deepinfra.kvstores.ssd.disk import Disk, read_upto
from deepinfra.kvstores.ssd.format import Entry, Owner, unpack_header
from deepinfra.kvstores.ssd.reading import read_records

__all__ = ("Asker", "Held", "Twin")

_BLOCK, _SNAPSHOT = 1, 2  # of `format.KINDS`
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512)


class Asker(NamedTuple):
    """Whose prompt is looked up: what its keys are made of, and the keys.

    `parents` are what each key is chained from.
    """

    namespace: Namespace
    layout: KVLayout
    windows: WindowPlan
    model: str
    tokens: Sequence[int]
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]


class Twin(NamedTuple):
    """The same tokens under other keys: whose, how many of them, seconds since, and what differs."""

    owner: Owner
    tokens: int
    age_s: float
    differs: str


class Held:
    """A folder's blocks by key.

    Args:
        folder: The store's.
        census: Of that folder.
        now: Unix seconds.
    """

    def __init__(self, folder: Path, census: Census, now: float) -> None:
        self._folder, self._census, self._now, self._disk = folder, census, now, Disk()
        self._kinds = census.rows["tag"] & 3
        self._blocks = np.flatnonzero(self._kinds == _BLOCK)
        self._order = np.argsort(census.rows["prefix"][:, 0])
        self._first = census.rows["prefix"][:, 0][self._order]

    def _row(self, key: BlockKey, kind: int = _BLOCK) -> int | None:
        """Number of a record's row, expired or not."""
        one, two = (int.from_bytes(key[start : start + 8], "little") for start in (0, 8))
        at = int(np.searchsorted(self._first, np.uint64(one)))
        while at < len(self._first) and int(self._first[at]) == one:
            row = int(self._order[at])
            if int(self._census.rows["prefix"][row, 1]) == two and int(self._kinds[row]) == kind:
                return row
            at += 1
        return None

    def miss(self, asker: Asker, seen: Callable[[int], None] = lambda nbytes: None) -> Miss:
        """Where the search for a prompt's blocks ends; every block before that is read and checked.

        Args:
            asker: Whose prompt.
            seen: Told bytes that were read.
        """
        size, oldest, count, missed = asker.layout.block_size, self._now, 0, ""
        for key in asker.keys:
            row = self._row(key)
            if row is None:
                # What continues a block is never saved without it: it was here.
                behind = any(self._row(later) is not None for later in asker.keys[count + 1 :])
                missed = "evicted" if behind else "absent"
            elif not self._census.alive[row]:
                missed = "expired"
            elif not self._whole(key, row, asker):
                missed = "damaged"
            if missed:
                break
            assert row is not None
            oldest = min(oldest, float(self._census.rows["created"][row]))
            seen(int(self._census.nbytes[row]))
            count += 1
        tiers = (TierHit("ssd", count, self._now - oldest),) if count else ()
        other = self._other(asker, count) if missed == "absent" else ()
        return Miss(size, tiers, missed, other, self._usable(asker, count))

    def _usable(self, asker: Asker, count: int) -> int:
        """Tokens of `count` blocks behind which a sequence can go on: -1 for all, fewer where windows are missing."""
        windows, size = asker.windows, asker.layout.block_size
        if not windows.rows or not count:
            return -1
        boundaries = [
            (index + 1) * size
            for index, key in enumerate(asker.keys[:count])
            if (row := self._row(key, _SNAPSHOT)) is not None and self._census.alive[row]
        ]
        known, held = len(asker.tokens), count * size
        return max(windows.first_row(held, known), windows.deepest(boundaries, held, known))

    def _whole(self, key: BlockKey, row: int, asker: Asker) -> bool:
        """Whether a record can be read, and is of the size that the model's blocks have."""
        entry = Entry._make(self._census.rows[row].item())
        path = self._folder / self._census.files[int(self._census.file[row])].name
        try:
            (record,) = read_records(self._disk, [(path, key, entry._replace(prefix=key[:16]))])
        except OSError:
            return False
        return record is not None and record.data.nbytes == FRAME_NBYTES + asker.layout.block_nbytes

    def _other(self, asker: Asker, index: int) -> tuple[int, ...]:
        """Tokens of the block in a block's place that shares most with it, and of one that follows it."""
        size, parent = asker.layout.block_size, asker.parents[index]
        asked = asker.tokens[index * size : (index + 1) * size]
        following: dict[bytes, tuple[int, ...]] = {}
        found: list[tuple[tuple[int, ...], bytes]] = []
        for header in self._headers(asker):
            if header.parent == parent:
                found.append((header.tokens, header.id))
            elif header.parent not in following:
                following[header.parent] = header.tokens
        if not found:
            return ()
        best, key = max(found, key=lambda pair: shared(pair[0], asked))
        return (*best, *following.get(key, ()))

    def _headers(self, asker: Asker) -> Iterator[_Told]:
        """What is said of living blocks of the asker's tenant and model."""
        wanted = [
            number
            for number, owner in enumerate(self._census.owners)
            if (owner.tenant, owner.model) == (asker.namespace.tenant, asker.model)
        ]
        rows = self._blocks[np.isin(self._census.owner[self._blocks], wanted) & self._census.alive[self._blocks]]
        for row in rows.tolist():
            told = self._told(row)
            if told is not None:
                yield told

    def _told(self, row: int) -> _Told | None:
        path = self._folder / self._census.files[int(self._census.file[row])].name
        offset, nbytes = (int(self._census.rows[name][row]) for name in ("offset", "header_nbytes"))
        try:
            fd = self._disk.open(path)
            try:
                header = unpack_header(read_upto(self._disk, fd, nbytes, offset))
            finally:
                self._disk.close(fd)
        except OSError:
            return None
        return None if header is None or not header.kind else _Told(header.id, header.parent, header.tokens)

    def twins(self, asker: Asker) -> list[Twin]:
        """Other owners that hold the beginning of the same tokens, those with most first."""
        own = {namespace_digest(asker.namespace), *asker.parents}
        found: list[Twin] = []
        for owner in self._census.owners:
            if owner.namespace in own:
                continue
            sizes = dict.fromkeys((asker.layout.block_size, *_BLOCK_SIZES))
            for size in sizes:
                rows = self._run(block_keys(BlockKey(owner.namespace), asker.tokens, size))
                if rows:
                    created = float(self._census.rows["created"][rows].min())
                    nbytes = int(self._census.rows["nbytes"][rows[0]])
                    why = _difference(owner, asker, size, nbytes)
                    found.append(Twin(owner, len(rows) * size, self._now - created, why))
                    break
        return sorted(found, key=lambda twin: -twin.tokens)

    def _run(self, keys: Sequence[BlockKey]) -> list[int]:
        rows: list[int] = []
        for key in keys:
            row = self._row(key)
            if row is None or not self._census.alive[row]:
                break
            rows.append(row)
        return rows


class _Told(NamedTuple):
    id: bytes
    parent: bytes
    tokens: tuple[int, ...]


def _difference(owner: Owner, asker: Asker, block_size: int, nbytes: int) -> str:
    """What differs between two owners of the same tokens, as far as it shows."""
    namespace, layout = asker.namespace, asker.layout
    if namespace_digest(replace(namespace, tenant=owner.tenant)) == owner.namespace:
        return "only the tenant differs: tenants share nothing but declared public prefixes"
    if namespace_digest(replace(namespace, salt="")) == owner.namespace:
        return "only the salt differs: this request has one (`cache_salt`)"
    if block_size != layout.block_size:
        return f"blocks of {block_size} tokens there, of {layout.block_size} here (an option of the executor)"
    if nbytes != FRAME_NBYTES + layout.block_nbytes:
        there, here = (f"{count} bytes a block" for count in (nbytes - FRAME_NBYTES, layout.block_nbytes))
        return f"{there} there, {here} here: the element type of the KV, or another model"
    if owner.model != asker.model:
        return f"another model, {owner.model!r}"
    if owner.tenant != namespace.tenant:
        return "another tenant, and perhaps other weights, template or numerics"
    return "the weights, the template or tokenizer, an adapter, the numerics mode, or a salt"
