"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`: how text is cut before byte-level BPE.

A GGUF file holds a name, not the patterns; a wrong pattern gives a model that answers slightly worse and no error.
So a name either is in `SPLITS` with how it was checked, or is refused (`REFUSED` says why for those known).

Source: the names are those of llama.cpp (`src/llama-vocab.cpp`), the patterns those that it quotes from the models'
own `tokenizer.json` files where it does, else its own. What changed: llama.cpp emulates character classes by collapsing
them into one byte, and cases by spelling them out; here they are written for a Unicode regex engine.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

__all__ = ("REFUSED", "SPLITS", "Split")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_DEEPSEEK_CJK = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}"
    r"\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}"
    r"\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}"
    r"\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}"
    r"\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}"
    r"\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}"
    r"\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}"
    r"\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}"
    r"\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}"
    r"\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_YOUTU_SCRIPTS = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
    r"|[\x{3105}-\x{312f}]+|[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_TAIL}"
_SPARK_WORDS = _DEEPSEEK_WORDS.replace(r"[\r\n]*|\s*[\r\n]+|", r"|[\r\n]|")
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _JAIS2_SPACES + r"|\s{1,2}(?!\S)|\s{1}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEFAULT_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


class Checked(Enum):
    """On which of 500 texts, with a vocabulary in which every cut shows, the ids equal llama.cpp's.

    Where they differ, the pattern here is the one that llama.cpp writes out, read by a regex engine that knows every
    class; llama.cpp's own engine approximates it. Characters up to Unicode 14 fall into the same classes in both (the
    CJK extensions were sampled); of later ones either may know more.
    """

    EXACT = "all"
    CASED = "all but some with combining marks or cased letters beyond ASCII, for which llama.cpp knows no classes"
    SPACES = "all but some with spaces beyond ASCII, which llama.cpp replaces before it matches character ranges"


class Split(NamedTuple):
    """How text is cut, each pattern cutting the pieces that the one before left.

    Attributes:
        patterns: Regular expressions; a match becomes a piece, and so does what lies between matches.
        ignore_merges: Whether a piece that is itself a token is taken whole, whatever the merges say.
        add_bos: Whether a text begins with the begin token when the file does not say.
        checked: How far it was compared with llama.cpp (llama-cpp-python 0.3.36), see `Checked`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    checked: Checked = Checked.EXACT


_GPT2_SPLIT = Split((_GPT2,))
_DIGIT_SPLIT = Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = Split((_LLAMA3,))
_LLAMA3_WHOLE = Split((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_SPLIT = Split((_QWEN2,))
_DEEPSEEK3_SPLIT = Split((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_WORDS))
_GPT4O_SPLIT = Split((_GPT4O,), checked=Checked.CASED)
_BLOOM_SPLIT = Split((_BLOOM,))
_BAILING_SPLIT = Split((_BAILING,))

SPLITS: Final[dict[str, Split]] = {
    "gpt-2": _GPT2_SPLIT,
    "phi-2": _GPT2_SPLIT,
    "mpt": _GPT2_SPLIT,
    "olmo": _GPT2_SPLIT,
    "jais": _GPT2_SPLIT,
    "trillion": _GPT2_SPLIT,
    "granite-docling": _GPT2_SPLIT,
    "exaone4": _GPT2_SPLIT,
    "gigachat": _GPT2_SPLIT,
    "a.x-4.0": _GPT2_SPLIT,
    "mellum": _GPT2_SPLIT,
    "smollm": _DIGIT_SPLIT,
    "starcoder": _DIGIT_SPLIT,
    "refact": _DIGIT_SPLIT,
    "command-r": _DIGIT_SPLIT,
    "codeshell": _DIGIT_SPLIT,
    "exaone": _DIGIT_SPLIT,
    "minerva-7b": _DIGIT_SPLIT,
    "mellum2": _DIGIT_SPLIT,
    "llama3": _LLAMA3_WHOLE,
    "llama-v3": _LLAMA3_WHOLE,
    "llama-bpe": _LLAMA3_WHOLE,
    "falcon3": _LLAMA3_WHOLE,
    "falcon-h1": _LLAMA3_WHOLE,
    "pixtral": _LLAMA3_WHOLE,
    "midm-2.0": _LLAMA3_WHOLE,
    "lfm2": _LLAMA3_WHOLE,
    "dbrx": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "chatglm-bpe": _LLAMA3_SPLIT,
    "glm4": Split((_LLAMA3,), ignore_merges=True),
    "glm5": Split((_LLAMA3,), ignore_merges=True),
    "minicpm5": Split((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "kormo": _QWEN2_SPLIT,
    "megrez": _QWEN2_SPLIT,
    "stablelm2": _QWEN2_SPLIT,
    "hunyuan": _QWEN2_SPLIT,
    "solar-open": _QWEN2_SPLIT,
    "grok-2": _QWEN2_SPLIT,
    "qwen35": Split((_QWEN35,)),
    "laguna": Split((r"[^\n]+|[\n]+", _QWEN2)),
    "ufakzeka": Split((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "jais-2": Split((_JAIS2,)),
    "exaone-moe": Split((_EXAONE_MOE,)),
    "deepseek-llm": Split(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_PUNCTUATION, r"\s+$", _DEEPSEEK_CJK, r"\p{N}+"),
        checked=Checked.SPACES,
    ),
    "spark2_5": Split((r"\p{N}{1,3}", _CJK_KANA, _SPARK_WORDS, r"\p{N}")),
    "youtu": Split(
        (_YOUTU_SCRIPTS, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")), ignore_merges=True, checked=Checked.CASED
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"), checked=Checked.SPACES),
    "deepseek-v3": _DEEPSEEK3_SPLIT,
    "hunyuan-dense": _DEEPSEEK3_SPLIT,
    "joyai-llm": _DEEPSEEK3_SPLIT,
    "hy_v4": _DEEPSEEK3_SPLIT,
    "default": Split((_DEFAULT_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "poro-chat": _BLOOM_SPLIT,
    "bloom": _BLOOM_SPLIT,
    "gpt3-finnish": _BLOOM_SPLIT,
    "viking": Split((_BLOOM, r"\p{N}")),
    "tekken": Split((_TEKKEN,), ignore_merges=True, add_bos=True, checked=Checked.CASED),
    "gpt-4o": _GPT4O_SPLIT,
    "llama4": _GPT4O_SPLIT,
    "kanana2": _GPT4O_SPLIT,
    "talkie": _GPT4O_SPLIT,
    "minimax-m2": _GPT4O_SPLIT,
    "bailingmoe": _BAILING_SPLIT,
    "bailingmoe2": _BAILING_SPLIT,
    "llada-moe": _BAILING_SPLIT,
    "seed-coder": Split((_SEED_CODER,)),
}

_EMBEDDING = "belongs to models that make embeddings, not text"
_SPM_BPE = "is byte-pair encoding over raw UTF-8, which is not built here"
_GROUPS = "groups digits from the right by a rule that is not built here"

# Names that llama.cpp knows and this table does not build, with the reason that the error gives.
REFUSED: Final[dict[str, str]] = {
    "jina-v1-en": _EMBEDDING,
    "jina-v2-code": _EMBEDDING,
    "jina-v2-de": _EMBEDDING,
    "jina-v2-es": _EMBEDDING,
    "jina-de": _EMBEDDING,
    "jina-es": _EMBEDDING,
    "jina-v5-nano": _EMBEDDING,
    "roberta-bpe": _EMBEDDING,
    "modern-bert": _EMBEDDING,
    "f2llmv2": _EMBEDDING,
    "granite-embed-multi-97m": _EMBEDDING,
    "granite-embed-multi-311m": _EMBEDDING,
    "gemma4": _SPM_BPE,
    "sarvam-moe": _SPM_BPE,
    "whitespace": "takes whole words from a list, which is not built here",
    "kimi-k2": "cuts Chinese by rules that are not built here",
    "afmoe": _GROUPS,
    "tiny_aya": _GROUPS,
    "cohere2moe": _GROUPS,
    "superbpe": _GROUPS,
    "chameleon": "cuts image tokens out of the text by rules that are not built here",
}
