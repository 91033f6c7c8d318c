"""Reads the `tokenizer.` keys of a GGUF file: the vocabulary, its types and its special tokens."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeVar, cast

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models.pretokenizers import SPLITS
from deepinfra.models.records import SpecialTokens

if TYPE_CHECKING:
    from pathlib import Path

    from deepinfra.models.gguf_file import MetaValue

__all__ = ("GgufVocab", "TokenType")

_T = TypeVar("_T", str, int, float)


class TokenType(IntEnum):
    """The kinds of tokens in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that end a turn or an answer wherever they are tokens. Source: llama.cpp (`special_eog_ids`), which needs the
# list because most files name one end token only. Left out: `</s>` (an end token only where the file names it) and the
# fill-in-the-middle tokens, which end no answer.
_END_TEXTS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)

# Keys of `tokenizer.` that are read here or change nothing for byte-level BPE and sentencepiece BPE.
_KNOWN: Final = frozenset(
    {
        "chat_template",
        "chat_templates",
        "ggml.add_bos_token",
        "ggml.add_eos_token",
        "ggml.add_space_prefix",
        "ggml.bos_token_id",
        "ggml.cls_token_id",
        "ggml.eom_token_id",
        "ggml.eos_token_id",
        "ggml.eot_token_id",
        "ggml.fim_mid_token_id",
        "ggml.fim_pad_token_id",
        "ggml.fim_pre_token_id",
        "ggml.fim_rep_token_id",
        "ggml.fim_sep_token_id",
        "ggml.fim_suf_token_id",
        "ggml.mask_token_id",
        "ggml.merges",
        "ggml.middle_token_id",
        "ggml.model",
        "ggml.padding_token_id",
        "ggml.pre",
        "ggml.prefix_token_id",
        "ggml.scores",
        "ggml.seperator_token_id",
        "ggml.suffix_token_id",
        "ggml.token_type",
        "ggml.token_type_count",
        "ggml.tokens",
        "ggml.unknown_token_id",
        "huggingface.json",
    }
)
_ONLY_FALSE: Final = frozenset({"ggml.add_sep_token", "ggml.remove_extra_whitespaces"})
_MAX_TOKENS: Final = 2**21


class GgufVocab:
    """The vocabulary of a GGUF file, checked.

    Attributes:
        path: The file, for errors.
        model: "gpt2" (byte-level BPE) or "llama" (sentencepiece BPE).
        pre: Name of the pre-tokenizer, None when the file names none.
        tokens: Text by id.
        ids: Id by text.
        types: `TokenType` by id.
        scores: Score by id; zeros when the file has none.
        merges: "left right", best first.
        control_ids: Tokens that user text must never become.
        marker_ids: Added tokens that any text may become.
        add_bos: Whether a text begins with `bos_id`.
        add_eos: Whether a text ends with `eos_id`.
        add_space_prefix: Whether a space is put before a text (sentencepiece only).

    Raises:
        UnsupportedModelError: A key has an effect that is not implemented.
        ModelError: A key is missing, of the wrong type, or contradicts another.
    """

    def __init__(self, metadata: dict[str, MetaValue], path: Path) -> None:
        self.path, self._metadata = path, metadata
        self._refuse_unknown()
        self.model = self._text("model")
        if self.model not in ("gpt2", "llama"):
            raise UnsupportedModelError("tokenizer.ggml.model", self.model, "is a kind of tokenizer not built here")
        self.pre = self._text("pre") if "tokenizer.ggml.pre" in metadata else None

        self.tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(self._list("tokens", str))]
        count = len(self.tokens)
        if not 0 < count <= _MAX_TOKENS:
            raise ModelError(f"{path} is damaged: its vocabulary has {count} tokens")
        self.ids = {text: token for token, text in enumerate(self.tokens)}
        if len(self.ids) != count:
            raise ModelError(f"{path} is damaged: its vocabulary holds a token twice")
        self.types = self._types(count)
        self.scores = self._list("scores", float, count) if self.model == "llama" else [0.0] * count
        self.merges = self._list("merges", str) if self.model == "gpt2" else []

        default_add_bos = self.model == "llama" or (self.pre in SPLITS and SPLITS[self.pre].add_bos)
        self.add_bos = self._flag("add_bos_token", default_add_bos)
        self.add_eos = self._flag("add_eos_token", False)
        self.add_space_prefix = self._flag("add_space_prefix", self.model == "llama")
        self._read_special()

    def special_tokens(self) -> SpecialTokens:
        """Returns what recipes need to know about the special tokens."""
        return SpecialTokens(
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            unk_id=self.unk_id,
            pad_id=self.pad_id,
            eos_ids=self.eos_ids,
            control_ids=self.control_ids,
            marker_ids=self.marker_ids,
            add_bos=self.add_bos and self.bos_id is not None,
            bos_token=None if self.bos_id is None else self.tokens[self.bos_id],
            eos_token=None if self.eos_id is None else self.tokens[self.eos_id],
        )

    def _read_special(self) -> None:
        self.bos_id, self.eos_id = self._id("bos"), self._id("eos")
        self.unk_id, self.pad_id = self._id("unknown"), self._id("padding")
        if self.model == "llama":  # the defaults of every sentencepiece model of the llama family
            self.bos_id = 1 if self.bos_id is None else self.bos_id
            self.eos_id = 2 if self.eos_id is None else self.eos_id
            self.unk_id = 0 if self.unk_id is None else self.unk_id
        by_text = {self.ids[text] for text in _END_TEXTS if text in self.ids}
        # A normal token of such a text is one that a byte-level vocabulary happens to contain, it ends nothing.
        by_text = {token for token in by_text if self.types[token] not in (TokenType.NORMAL, TokenType.UNUSED)}
        if {"<|return|>", "<|call|>"} <= self.ids.keys() or {"<|calls|>", "<|flush|>"} <= self.ids.keys():
            by_text.discard(self.ids.get("<|end|>", -1))  # ends a message of several there, not the answer
        named = {self.eos_id, self._id("eot"), self._id("eom")} - {None}
        self.eos_ids = frozenset(by_text | {token for token in named if token is not None})

        self.control_ids = self._of(TokenType.CONTROL, TokenType.UNKNOWN) | by_text
        self.marker_ids = self._of(TokenType.USER_DEFINED) - self.control_ids

    def _of(self, *kinds: TokenType) -> frozenset[int]:
        wanted = set(map(int, kinds))  # plain ones are found at once: a vocabulary is read at each start
        return frozenset(token for token, kind in enumerate(self.types) if kind in wanted)

    def _refuse_unknown(self) -> None:
        for key, value in self._metadata.items():
            name = key.removeprefix("tokenizer.")
            if name == key or name in _KNOWN or name.startswith("chat_template."):
                continue
            if name in _ONLY_FALSE and value is False:
                continue
            raise UnsupportedModelError(key, value if not isinstance(value, list) else f"[{len(value)} values]")

    def _types(self, count: int) -> list[int]:
        if "tokenizer.ggml.token_type" not in self._metadata:
            return [int(TokenType.NORMAL)] * count
        types = self._list("token_type", int, count)
        if not set(types) <= set(TokenType):
            raise ModelError(f"{self.path} is damaged: tokenizer.ggml.token_type holds unknown kinds")
        return types

    def _text(self, name: str) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, str):
            raise ModelError(f"{self.path} has no tokenizer: tokenizer.ggml.{name} is {value!r}")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path} is damaged: tokenizer.ggml.{name} is {value!r}")
        return value

    def _id(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.tokens):
            raise ModelError(f"{self.path} is damaged: tokenizer.ggml.{name}_token_id is {value!r}")
        return value

    def _list(self, name: str, kind: type[_T], count: int | None = None) -> list[_T]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list):
            raise ModelError(f"{self.path} is damaged: tokenizer.ggml.{name} is not a list")
        if not set(map(type, value)) <= {kind}:
            raise ModelError(
                f"{self.path} is damaged: tokenizer.ggml.{name} holds something that is no {kind.__name__}"
            )
        if count is not None and len(value) != count:
            raise ModelError(
                f"{self.path} contradicts itself: tokenizer.ggml.{name} has {len(value)} entries for {count} tokens"
            )
        return cast("list[_T]", value)
