"""Builds an exact `tokenizers.Tokenizer` from the vocabulary in a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models.gguf_vocab import GgufVocab, TokenType
from deepinfra.models.pretokenizers import REFUSED, SPLITS, Split
from deepinfra.models.spm import merges_from_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("build_tokenizer",)

_SPACE: Final = "▁"


def build_tokenizer(vocab: GgufVocab) -> Tokenizer:
    """Builds the tokenizer that a vocabulary describes.

    Ids equal llama.cpp's for every text, with these exceptions, in which the models' own tokenizers are followed: a
    control token is never put together from ordinary text, overlapping added tokens are found leftmost first.

    Raises:
        UnsupportedModelError: The vocabulary is of a kind, or names a pre-tokenizer, that is not reproduced here.
        ModelError: The vocabulary contradicts itself.
    """
    if vocab.model == "gpt2":
        tokenizer = _byte_level(vocab, _split(vocab))
    else:
        tokenizer = _sentencepiece(vocab)
    added = [
        AddedToken(vocab.tokens[token], special=token in vocab.control_ids, normalized=False)
        for token in sorted(vocab.control_ids | vocab.marker_ids)
    ]
    tokenizer.add_tokens(added)
    _add_ends(tokenizer, vocab)
    return tokenizer


def _split(vocab: GgufVocab) -> Split:
    name = vocab.pre
    if name is None:
        raise UnsupportedModelError(
            "tokenizer.ggml.pre", None, "is missing: the file is too old to say how text is cut; convert it again"
        )
    if name not in SPLITS:
        raise UnsupportedModelError("tokenizer.ggml.pre", name, REFUSED.get(name, "is an unknown pre-tokenizer"))
    return SPLITS[name]


def _byte_level(vocab: GgufVocab, split: Split) -> Tokenizer:
    ids = vocab.ids
    merges = [merge.partition(" ")[::2] for merge in vocab.merges]  # "" where a side is missing, which is no token
    for merge in merges:
        if merge[0] not in ids or merge[1] not in ids or "".join(merge) not in ids:
            raise ModelError(f"{vocab.path} is damaged: its merge {' '.join(merge)!r} joins no two tokens")
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=split.ignore_merges))
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - ids.keys())
    tokenizer.pre_tokenizer = byte_pre_tokenizer(split, missing)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_pre_tokenizer(split: Split, missing: Sequence[str] = ()) -> pre_tokenizers.PreTokenizer:
    """Builds what cuts text into pieces and spells their bytes as characters.

    Args:
        split: How to cut.
        missing: Characters (of the byte alphabet) that the vocabulary lacks. The BPE model drops these before it
            merges, so that their neighbours could merge; in llama.cpp they cannot, so they are taken out here.
    """
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if missing:
        escaped = "".join(f"\\x{{{ord(character):x}}}" for character in missing)
        steps.append(pre_tokenizers.Split(Regex(f"[{escaped}]"), "removed"))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(vocab: GgufVocab) -> Tokenizer:
    pieces = {
        text: token
        for text, token in vocab.ids.items()
        if vocab.types[token] not in (TokenType.UNKNOWN, TokenType.BYTE) and token not in vocab.control_ids
    }
    unknown = vocab.tokens[vocab.unk_id] if vocab.unk_id is not None else None
    merges = merges_from_scores(pieces, vocab.scores)
    has_bytes = all(f"<0x{byte:02X}>" in vocab.ids for byte in range(256))
    if not has_bytes:
        raise UnsupportedModelError("tokenizer.ggml.tokens", "no byte tokens", "cannot spell every text")
    tokenizer = Tokenizer(models.BPE(vocab.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    tail: list[decoders.Decoder] = []
    if vocab.add_space_prefix:
        steps.insert(0, normalizers.Prepend(_SPACE))
        tail.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def _add_ends(tokenizer: Tokenizer, vocab: GgufVocab) -> None:
    ends: list[tuple[str, int]] = []
    single: list[str] = ["$A"]
    pair: list[str] = ["$A", "$B"]
    if vocab.add_bos and vocab.bos_id is not None:
        text = vocab.tokens[vocab.bos_id]
        ends.append((text, vocab.bos_id))
        single, pair = [text, *single], [text, "$A", text, "$B"]
    if vocab.add_eos and vocab.eos_id is not None:
        text = vocab.tokens[vocab.eos_id]
        ends.append((text, vocab.eos_id))
        single, pair = [*single, text], [*pair, text]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
