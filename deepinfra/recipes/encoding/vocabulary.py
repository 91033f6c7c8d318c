"""Which tokens are control tokens, and an encoder that makes them only where it is told to.

The encoder is a second tokenizer that knows every control token by a name that nobody can type. A prompt is encoded in
one call with those names in place of the template's markers, so merges, prefix rules and white-space flags act exactly
as in training; the spelling that a user can type is no token there. It shares the first one's vocabulary and merges
where these cannot make a control token of text, else it has some of its own, without the control tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

import tokenizers

from deepinfra.errors import InjectionError, ModelError

__all__ = ("SafeEncoder", "control_tokens")

_MARKER = re.compile(r"<[^<>\s]+>|<\|.*\|>|\[/?[A-Z][A-Z0-9_ ]*\]|<｜.*｜>", re.DOTALL)

_ENTRY = 100
"""Characters that a kept text counts for besides its own: many short ones take the memory of fewer long ones."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

_FORGED = "the prompt's control tokens are not those that the template wrote; it is not served"


def control_tokens(definition: Mapping[str, Any], literals: Iterable[str], special: Iterable[int]) -> dict[str, int]:
    """Spelling and id of every token that no text may become.

    Args:
        definition: A `tokenizer.json`.
        literals: The chat template's own text.
        special: Ids that the model's files call control tokens.

    Of the added tokens these are the special ones, those that the template writes, and those shaped like a marker;
    white space, words and bare punctuation stay text, and anything else is control.
    """
    special, written = set(special), "\0".join(literals)
    control: dict[str, int] = {}
    for token in definition["added_tokens"]:
        content = token["content"]
        plain = not content.strip() or content.isalnum()
        shaped = _MARKER.fullmatch(content) or content in written or any(map(str.isalnum, content))
        if token["special"] or token["id"] in special or (shaped and not plain):
            control[content] = token["id"]
    missing = special - set(control.values())
    if missing:
        control |= {text: token for text, token in _pieces(definition["model"]).items() if token in missing}
    return control


def _pieces(model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model["vocab"]
    return vocab if isinstance(vocab, dict) else {piece[0]: index for index, piece in enumerate(vocab)}


class SafeEncoder:
    """Encodes text in which given ranges, and nothing else, are control tokens. Thread-safe.

    Args:
        definition: A `tokenizer.json`; not changed.
        control: From `control_tokens`.
        cache_chars: Characters of text between control tokens whose ids are kept.
        original: The tokenizer that the definition is of, if it may be shared. To load another one takes 0.3 s and 25
            MB for 49,152 tokens.

    Raises:
        ModelError: The tokenizer cannot be renamed.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        control: Mapping[str, int],
        cache_chars: int,
        original: tokenizers.Tokenizer | None = None,
    ) -> None:
        self.control = dict(control)
        self.control_ids = frozenset(control.values())
        self._checked = self.control_ids - _unknown(definition["model"])
        self._pattern = re.compile(_longest_of(control) or r"(?!)")
        nonce = secrets.token_hex(8)
        self._names = {text: f"\ue0f0{nonce}{index:08x}\ue0f1" for index, text in enumerate(control)}
        if original is not None and _harmless(definition["model"], control):
            self._tokenizer = _sharing(original, definition, self._names)
        else:
            self._tokenizer = _renamed(definition, control, self._names)
        self._ids = {self._tokenizer.token_to_id(name): control[text] for text, name in self._names.items()}
        for token in definition["added_tokens"]:
            if token["content"] not in control:
                self._ids[self._tokenizer.token_to_id(token["content"])] = token["id"]
        for text, name in self._names.items():
            ids = self._tokenizer.encode(name, add_special_tokens=False).ids
            if ids != [self._tokenizer.token_to_id(name)]:
                raise ModelError(f"the tokenizer's normalizer changes the private name of control token {text!r}")
        self._cache: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._cached_chars, self._cache_chars, self._lock = 0, 0, Lock()
        flags = ("lstrip", "rstrip", "single_word")
        added = (token for token in definition["added_tokens"] if token["content"] in self.control)
        if not any(token[flag] for token in added for flag in flags) and self._independent():
            self._cache_chars = cache_chars

    @property
    def caches(self) -> bool:
        """Whether ids of text between control tokens are kept: they do not depend on what stands around it."""
        return self._cache_chars > 0

    def spells(self, text: str) -> bool:
        """Whether `text` spells a control token anywhere."""
        return self._pattern.search(text) is not None

    def found(self, text: str) -> set[str]:
        """First characters of the control tokens that `text` spells, of overlapping ones too; empty without any."""
        starts: set[str] = set()
        match = self._pattern.search(text)
        while match is not None:
            starts.add(match[0][0])
            match = self._pattern.search(text, match.start() + 1)
        return starts

    def defang(self, text: str, substitutes: Mapping[str, str]) -> str:
        """`text` of the same length in which no control token is spelled: the first character of each is replaced.

        Some templates look for a marker in what they are given and write it again as their own; they must not find it.
        """
        while self._pattern.search(text):  # once more for each marker inside a marker
            text = self._pattern.sub(lambda match: substitutes[match[0][0]] + match[0][1:], text)
        return text

    def ranges(self, text: str, trust: bytes) -> list[tuple[int, int]]:
        """Where trusted characters alone spell control tokens, longest first in each place."""
        text = str.__str__(text)
        found: list[tuple[int, int]] = []
        search = self._pattern.finditer
        start = trust.find(1)
        while start >= 0:
            end = trust.find(0, start)
            end = len(trust) if end < 0 else end
            found += [match.span() for match in search(text, start, end)]
            start = trust.find(1, end)
        return found

    def encode(self, text: str, ranges: Sequence[tuple[int, int]] = ()) -> tuple[list[int], list[int]]:
        """Ids of `text`, and the positions of the control tokens among them.

        Raises:
            InjectionError: The control tokens that came out are not those of `ranges`.
        """
        text = str.__str__(text)
        if self._cache_chars:
            return self._by_gaps(text, ranges)
        ids = self._whole(text, ranges)
        wanted = [token for start, end in ranges if (token := self.control[text[start:end]]) in self._checked]
        positions = [index for index, token in enumerate(ids) if token in self._checked]
        if [ids[index] for index in positions] != wanted:
            raise InjectionError(_FORGED)
        return ids, positions

    def _whole(self, text: str, ranges: Sequence[tuple[int, int]]) -> list[int]:
        parts: list[str] = []
        at = 0
        for start, end in ranges:
            parts += (text[at:start], self._names[text[start:end]])
            at = end
        ids = self._tokenizer.encode("".join((*parts, text[at:])), add_special_tokens=False).ids
        own = self._ids.setdefault  # one object per id, or the cache would hold one per token
        return [own(token, token) for token in ids]

    def _by_gaps(self, text: str, ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        gaps = [text[end:start] for (_, end), (start, _) in zip(((0, 0), *ranges), ranges, strict=False)]
        gaps.append(text[ranges[-1][1] if ranges else 0 :])
        cache = self._cache
        with self._lock:
            known = [cache.get(gap) for gap in gaps]
            for gap, cached in zip(gaps, known, strict=True):
                if cached is not None:
                    cache.move_to_end(gap)
        ids: list[int] = []
        positions: list[int] = []
        for index, cached in enumerate(known):
            ids += self._gap(gaps[index]) if cached is None else cached
            if index < len(ranges):
                start, end = ranges[index]
                token = self.control[text[start:end]]
                if token in self._checked:
                    positions.append(len(ids))
                ids.append(token)
        return ids, positions

    def _gap(self, text: str) -> tuple[int, ...]:
        """Ids of text between control tokens, kept; asserted to hold none."""
        ids = tuple(self._whole(text, ()))
        if not self._checked.isdisjoint(ids):
            raise InjectionError(_FORGED)
        with self._lock:
            if text not in self._cache:
                self._cache[text] = ids
                self._cached_chars += _ENTRY + len(text)
            while self._cached_chars > self._cache_chars:
                self._cached_chars -= _ENTRY + len(self._cache.popitem(last=False)[0])
        return ids

    def _independent(self) -> bool:
        """Whether text between control tokens has the ids it has alone: what the cache stands on."""
        marker = next(iter(self.control), None)
        if marker is None:
            return False
        for gap in ("a", " a", "  a", "\na", "a ", "a\n\n", "1", " ", "\n", "é", "don't", "\u3042", "A\tB  C"):
            alone = self._whole(gap, ())
            text = f"{gap}{marker}{gap}{marker}{marker}{gap}"
            spans = [match.span() for match in re.finditer(re.escape(marker), text)]
            m = [self.control[marker]]
            if self._whole(text, spans) != [*alone, *m, *alone, *m, *m, *alone]:
                return False
        return True


def _longest_of(texts: Iterable[str]) -> str:
    """Regular expression for the longest of these texts.

    A tree of their characters: DeepSeek's 1,283 tried one after the other cost 10 ms in a chat of 200,000 characters.
    """
    rests: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
        else:
            ends = True
    options = [re.escape(first) + _longest_of(rest) for first, rest in rests.items()]
    if not options or (len(options) == 1 and not ends):
        return "".join(options)
    return f"(?:{'|'.join(options)}){'?' if ends else ''}"


def _unknown(model: Mapping[str, Any]) -> set[int]:
    """The id for characters that the vocabulary cannot spell: where it comes out, it need not be a control token."""
    if isinstance(model.get("unk_token"), str):
        return {model["vocab"].get(model["unk_token"], -1)}
    return {model["unk_id"]} if model.get("unk_id") is not None else set()


def _harmless(model: Mapping[str, Any], control: Mapping[str, int]) -> bool:
    """Whether byte pairs are merged to tokens so that no text becomes a control token, and ids have no holes.

    Such a token would have to be a single character, a byte, a whole word (`ignore_merges`), or be made by a merge.
    """
    if model.get("type") != "BPE" or any(map(model.get, ("ignore_merges", *_AFFIXES))):
        return False
    if any(len(text) < 2 or _BYTE.fullmatch(text) for text in control):
        return False
    vocab = model["vocab"]
    return max(vocab.values(), default=-1) < len(vocab) and control.keys().isdisjoint(map(_joined, model["merges"]))


def _sharing(
    original: tokenizers.Tokenizer, definition: Mapping[str, Any], names: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """A tokenizer with the original's model and steps, that finds private names in place of control tokens."""
    tokenizer = tokenizers.Tokenizer(original.model)
    if original.normalizer is not None:
        tokenizer.normalizer = original.normalizer
    if original.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = original.pre_tokenizer
    added = [token for token in definition["added_tokens"] if token["content"] not in names]
    flags = {token["content"]: {name: token[name] for name in _FLAGS} for token in definition["added_tokens"]}
    tokens = [tokenizers.AddedToken(token["content"], **flags[token["content"]]) for token in added]
    tokens += [tokenizers.AddedToken(name, **flags.get(text, _PLAIN)) for text, name in names.items()]
    tokenizer.add_tokens(tokens)
    return tokenizer


def _renamed(
    definition: Mapping[str, Any], control: Mapping[str, int], names: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """A tokenizer that knows the control tokens by their private names only."""
    model = dict(definition["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint(_spellings(pair))]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in definition["added_tokens"]
    ]
    known = {token["content"] for token in added}
    added += [{"id": control[text], "content": name, **_PLAIN} for text, name in names.items() if name not in known]
    renamed = {
        **definition,
        "model": model,
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(renamed))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the tokenizer cannot be loaded with renamed control tokens: {error}") from error


def _joined(pair: str | Sequence[str]) -> str:
    """What a merge makes."""
    return pair.replace(" ", "") if isinstance(pair, str) else "".join(pair)


def _spellings(pair: str | Sequence[str]) -> tuple[str, str, str]:
    """Both sides of a merge and what it makes."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left, right, left + right
