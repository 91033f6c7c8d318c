"""Why a prompt was not found in the cache: what is held of it, and what stands where its next block would be.

A pool looks (`look`) before it computes anything, an answer puts into words what was found (`explanation_of`). Only
methods of `KVStore` are used, so any store can be explained; only blocks under the tenant's own keys are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

import anyio

from deepinfra.core.ids import BlockKey
from deepinfra.core.kv import PublicBlocks, TierHit, block_keys, parent_key
from deepinfra.interfaces.kvstore import KVStore
from deepinfra.interfaces.recipe import Recipe, Tokenizer

__all__ = (
    "Differs",
    "Explanation",
    "Miss",
    "Why",
    "explanation_of",
    "look",
    "look_in_time",
    "names_of",
    "shared",
    "spelled",
)

Why: TypeAlias = Literal[
    "all-held",
    "too-short",
    "differs",
    "never-seen",
    "expired",
    "evicted",
    "damaged",
    "tier-down",
    "no-store",
    "no-snapshot",
]
"""Why the search ended; see `explanation_of` for what each says."""

_log = logging.getLogger("deepinfra.engine")

_LOOK_TIMEOUT_S = 0.5
"""A request that is to be explained waits so long for it at most."""

_BEFORE, _BEHIND = 24, 16
"""Tokens shown before and from the first one that differs."""

_MOST_CHARS = 240
"""Characters of either, whatever its tokens spell."""


class Miss(NamedTuple):
    """Where the search for a prompt's blocks ended.

    Attributes:
        block_size: Tokens per block.
        tiers: The blocks that are held, by tier, the device's first.
        missed: Why the next one is not; a word of `Match.missed`, `tier-down`, or `no-store`.
        other: Token ids that are held in its place: of the block that shares most with it, and of what follows that.
        usable: Tokens behind which the sequence can go on; fewer than are held where window layers have no snapshot
            there. -1: all.
    """

    block_size: int
    tiers: tuple[TierHit, ...]
    missed: str
    other: tuple[int, ...] = ()
    usable: int = -1

    @property
    def blocks(self) -> int:
        """Leading blocks that are held."""
        return sum(hit.count for hit in self.tiers)


@dataclass(frozen=True, slots=True)
class Differs:
    """Two prompts part: the position of the first token that differs, and text around it, control tokens spelled."""

    position: int
    before: str
    asked: str
    held: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What of a prompt was held, and why no more.

    Attributes:
        prompt_tokens: Its length.
        held_tokens: Tokens of the leading blocks that are held.
        block_size: Tokens per block; only whole blocks are found.
        tiers: Where they are held, in blocks, and seconds since the oldest of each was saved.
        why: Why the next block was not found, in a word.
        words: The same in a sentence or two.
        differs: Where a held prompt goes on differently.
    """

    prompt_tokens: int
    held_tokens: int
    block_size: int
    tiers: tuple[TierHit, ...]
    why: Why
    words: str
    differs: Differs | None = None

    def without_text(self) -> Explanation:
        """The same, telling nothing of other prompts but that they differ: not what they say, and not where exactly.

        Told token by token where they part, a caller could spell out what another one asked.
        """
        if self.differs is None:
            return self
        words = f"{_block(self.held_tokens, self.block_size)} is not held; a block that begins otherwise is."
        return replace(self, differs=None, words=words)


async def look_in_time(
    pool: str,
    store: KVStore | None,
    root: BlockKey,
    keys: Sequence[BlockKey],
    tokens: Sequence[int],
    block_size: int,
    *,
    device: int,
    public: PublicBlocks | None,
) -> Miss:
    """`look`, but a store that is late or broken is a tier that is down; `pool` is named in the log."""
    try:
        with anyio.move_on_after(_LOOK_TIMEOUT_S):
            return await look(store, root, keys, tokens, block_size, device=device, public=public)
    except Exception:
        _log.exception("pool %s: the store failed to explain a miss", pool)
    return Miss(block_size, (TierHit("device", device, 0.0),) if device else (), "tier-down")


async def look(
    store: KVStore | None,
    root: BlockKey,
    keys: Sequence[BlockKey],
    tokens: Sequence[int],
    block_size: int,
    *,
    device: int = 0,
    public: PublicBlocks | None = None,
) -> Miss:
    """Find out where the search for a prompt's blocks ends; moves no KV.

    Args:
        store: Where blocks are held besides the device.
        root: Of the tenant's namespace.
        keys: Of all full blocks of `tokens`.
        tokens: The prompt.
        block_size: Tokens per block.
        device: Leading blocks that the device holds.
        public: See `block_keys`.
    """
    tiers = [TierHit("device", device, 0.0)] if device else []
    if store is None:
        return Miss(block_size, tuple(tiers), "no-store" if device < len(keys) else "")
    # Behind the device's own blocks too: the store may have lost the beginning of what the device still holds.
    match = await store.match(keys)
    before = 0
    for hit in match.tiers:
        behind = min(hit.count, before + hit.count - device)
        if behind > 0:
            tiers.append(TierHit(hit.tier, behind, hit.age_s))
        before += hit.count
    end = max(device, len(match.refs))
    if end == len(keys):
        return Miss(block_size, tuple(tiers), "")
    missed = match.missed
    if len(match.refs) < end:
        missed = (await store.match(keys[end : end + 1])).missed or "absent"
    other: tuple[int, ...] = ()
    # Where a public block would be, others of its tenant are: not to be shown to whoever shares only the public ones.
    if missed == "absent" and (public is None or end >= public.blocks):
        parent = parent_key(root, keys, end, public)
        other = await _in_its_place(store, parent, tokens[end * block_size :][:block_size])
    return Miss(block_size, tuple(tiers), missed, other)


async def _in_its_place(store: KVStore, parent: BlockKey, asked: Sequence[int]) -> tuple[int, ...]:
    """Tokens of the held block behind `parent` that shares most with `asked`, and of one that follows it."""
    block_size = len(asked)
    found = [held for held in await store.successors(parent) if len(held) == block_size and held != tuple(asked)]
    if not found:
        return ()
    best = max(found, key=lambda held: shared(held, asked))
    # A store is not believed: what it says is shown only if this tenant's own key finds it.
    (key,) = block_keys(parent, best, block_size)
    if not (await store.match([key])).refs:
        return ()
    following = await store.successors(key, 1)
    return (*best, *(following[0] if following else ()))


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# -- in words -------------------------------------------------------------------------------------


def names_of(recipe: Recipe) -> dict[int, str]:
    """How a recipe's control tokens are spelled, by id."""
    return {token: text for text, token in recipe.report().control}


def spelled(tokens: Sequence[int], tokenizer: Tokenizer, names: Mapping[int, str]) -> str:
    """Text of tokens for people: control tokens by name, or as `<[id]>` where they have none."""
    pieces: list[str] = []
    pending = bytearray()
    for token in tokens:
        data = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
        if data and token not in names:
            pending += data
            continue
        pieces += (pending.decode("utf-8", "replace"), names.get(token, f"<[{token}]>"))
        pending.clear()
    return "".join((*pieces, pending.decode("utf-8", "replace")))


def explanation_of(miss: Miss, tokens: Sequence[int], recipe: Recipe, *, cached: int | None = None) -> Explanation:
    """Put a miss into words.

    Args:
        miss: What was found.
        tokens: The prompt.
        recipe: Spells tokens.
        cached: Tokens that were not computed in the end; fewer than were held if they could not be loaded.
    """
    size, held = miss.block_size, miss.blocks * miss.block_size
    why, words, differs = _why(miss, len(tokens)), "", None
    if why == "differs":
        differs = _differs(miss, tokens, recipe)
        words = (
            f"What is held goes on differently at token {differs.position}: {_quoted(differs.held)} where this prompt "
            f"has {_quoted(differs.asked)}."
        )
    else:
        words = _words(why, miss, len(tokens))
    most = min(held, len(tokens) - 1)
    usable = most if miss.usable < 0 else min(miss.usable, most)
    if usable < most:
        why = why if usable else "no-snapshot"
        words = (
            f"Of what is held, {usable} tokens can be reused: window layers begin only where a snapshot of them is "
            f"held, or behind rows computed again. {words}"
        )
    if cached is not None and cached < usable:
        why = "damaged"
        words = (
            f"{miss.blocks} blocks were found, but not all of them could be loaded whole and in time; "
            f"{cached} tokens were reused and the others computed. {words}"
        )
    return Explanation(
        prompt_tokens=len(tokens),
        held_tokens=held,
        block_size=size,
        tiers=miss.tiers,
        why=why,
        words=words,
        differs=differs,
    )


def _why(miss: Miss, length: int) -> Why:
    if length < miss.block_size:
        return "too-short"
    match miss.missed:
        case "":
            return "all-held"
        case "expired" | "evicted" | "damaged" | "tier-down" | "no-store" as why:
            return why
    return "differs" if miss.other else "never-seen"


def _words(why: Why, miss: Miss, length: int) -> str:
    size = miss.block_size
    which = _block(miss.blocks * size, size)
    match why:
        case "too-short":
            return f"Only whole blocks of {size} tokens are kept, and this prompt has {length}."
        case "all-held":
            rest = length % size
            last = f"the last {rest} tokens fill no block of {size}" if rest else "the last token"
            return f"Every whole block is held; {last} and {'are' if rest else 'is'} always computed."
        case "never-seen":
            begun = "goes on from there" if miss.blocks else "begins like this prompt"
            return f"{which} is not held, and nothing that is held {begun}: it was never saved, or everything is gone."
        case "expired":
            return f"{which} was held, but nobody used it for as long as its class is kept."
        case "evicted":
            return f"{which} was held, but other records needed its room."
        case "damaged":
            return f"{which} was held, but is damaged."
        case "tier-down":
            return (
                f"The store did not answer in time or cannot be reached; what it holds behind block {miss.blocks} "
                "counts as missing."
            )
        case _:
            return f"{which} is not on the device, and there is no store behind it."


def _block(start: int, size: int) -> str:
    return f"Block {start // size + 1} (tokens {start} to {start + size - 1})"


def _differs(miss: Miss, tokens: Sequence[int], recipe: Recipe) -> Differs:
    start = miss.blocks * miss.block_size
    position = start + shared(miss.other, tokens[start:])
    tokenizer, names = recipe.tokenizer, names_of(recipe)
    return Differs(
        position,
        spelled(tokens[max(0, position - _BEFORE) : position], tokenizer, names)[-_MOST_CHARS:],
        spelled(tokens[position : position + _BEHIND], tokenizer, names)[:_MOST_CHARS],
        spelled(miss.other[position - start :][:_BEHIND], tokenizer, names)[:_MOST_CHARS],
    )


def _quoted(text: str) -> str:
    """A short piece of text on one line."""
    return repr(text if len(text) <= 40 else text[:40] + "…")
