"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`: how text is cut before byte-level BPE.

A GGUF file holds a name, not the patterns; a wrong pattern gives a model that answers slightly worse and no error.
So a name either is in `SPLITS` with how it was checked, or is refused (`REFUSED` says why for those known).

Source: the names are those of llama.cpp (`src/llama-vocab.cpp`), the patterns those that it quotes from the models'
own `tokenizer.json` files where it does, else its own. What changed: llama.cpp emulates character classes by collapsing
them into one byte, and cases by spelling them out; here they are written for a Unicode regex engine.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
_CJK_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_TAIL}"
_DEFAULT_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


class Split(NamedTuple):
    """How text is cut, each pattern cutting the pieces that the one before left.

    Attributes:
        patterns: Regular expressions; a match becomes a piece, and so does what lies between matches.
        ignore_merges: Whether a piece that is itself a token is taken whole, whatever the merges say.
        add_bos: Whether a text begins with the begin token when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_SPLIT = Split((_GPT2,))
_DIGIT_SPLIT = Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = Split((_LLAMA3,))
_LLAMA3_WHOLE = Split((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_SPLIT = Split((_QWEN2,))
_DEEPSEEK3_SPLIT = Split((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_WORDS))
_GPT4O_SPLIT = Split((_GPT4O,))
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
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
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
    "tekken": Split((_TEKKEN,), ignore_merges=True, add_bos=True),
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

# Names that llama.cpp knows and this table does not build, with the reason that the error gives.
REFUSED: Final[dict[str, str]] = {}
