"""Makes the tokenizer vectors in tests/data/tokenizers with llama.cpp, the reference for GGUF vocabularies.

Run once, in an environment of its own, when llama.cpp learns a pre-tokenizer or the texts change:

    pip install llama-cpp-python==0.3.36
    python tests/data/scripts/make_tokenizer_vectors.py SMOLLM2.gguf

It writes `texts.json` (500 texts), `smollm2.json` and `spm.json` (their ids with the vocabularies of SmolLM2 and of
Llama 2) and `pretokenizers.json`: for each name in tokenizer.ggml.pre, put into `pair_vocabulary`, the number of a line
below; on each line, for every text, the first 8 hex digits of SHA-256 over its ids as little-endian uint32 (the ids
themselves would be 3 MB).
Special-token parsing is off and no begin token is added, as for text typed by a user.
"""

import ctypes
import hashlib
import json
import random
import struct
import sys
import tempfile
from pathlib import Path

import llama_cpp

DATA = Path(__file__).parent.parent
NAMES = (
    "default llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 deepseek-llm deepseek-coder "
    "deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 gigachat a.x-4.0 mellum jais-2 refact command-r "
    "qwen2 deepseek-r1-qwen kormo qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe glm4 glm5 viking "
    "jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe minerva-7b megrez gpt-4o llama4 "
    "kanana2 talkie trillion granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense "
    "hy_v4 joyai-llm ufakzeka grok-2 laguna minimax-m2 solar-open mellum2 minicpm5 "
).split()

WORDS = (
    "the quick brown fox Jumps OVER a lazy dog don't DON'T we'LL I'm you've they're 'twas o'clock naïve café résumé "
    "Straße ÉCOLE ÀÉÎõü Ærøskøbing İstanbul ıslak Ελληνικά ΕΛΛΑΔΑ русский ТЕКСТ українська עברית العربية فارسی हिन्दी "
    "বাংলা தமிழ் ไทย ភាសា ລາວ မြန်မာ 中文字符 漢字 日本語 ひらがな カタカナ ｶﾀｶﾅ 한국어 ㄱㄴㄷ ქართული Հայերեն አማርኛ ꦗꦮ "
    "1 12 123 1234 12345678 3.14159 1,000,000 0x7fff ١٢٣ १२३ ４５６ Ⅷ ½ ² 𝟘𝟙 "
    "😀 👩‍👩‍👧‍👦 🇩🇪 ✌🏽 🦙 ❤️ © ™ € £ → ∑ ≠ § µ ª º ǅ ʰ "
    "é ñ Å ạ̈ Z̷̡̛ a̐ é́ "
    'foo_bar fooBar HTTPServer camelCaseWord x=1; if(a==b){return -1;} <div class="x">&nbsp;</div> /usr/bin a/b//c '
    "http://example.org/?q=1&r=2#top user@example.org C++ #include <stdio.h> def f(x): return x**2 ++i -- ... !!! ?! — – … "
    "“quoted” ‘single’ «guillemets» 、。！？（全角） \\n \\t \\u1234 `code` ~tilde~ |pipe| ^hat^ $5.00 100% [1,2] {a:b} "
    "<|im_start|> <|im_end|> <|endoftext|> <s> </s> <unk> <0x0A> [INST] <tool_call> ▁ ▁▁ Ġ Ċ "
).split(" ")
SPACES = (
    " ",
    "  ",
    "   ",
    "    ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\t\t",
    " \n",
    "\n ",
    " \t \n",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u2028",
    "\u200b",
    "\u0085",
    "\x0b",
    "\x0c",
    "",
)


def make_texts() -> list[str]:
    """Returns 500 different texts, the same on each run."""
    draw = random.Random(20250)
    texts = [
        text
        for text in (DATA / "vocab/ggml-vocab-gpt-2.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ]
    texts += [
        character * count
        for character in " \n\t"
        for count in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 257)
    ]
    texts += [f"a{' ' * count}b{chr(10) * count}c{chr(9) * count}d" for count in (1, 2, 3, 4, 5, 8, 9, 16, 40)]
    texts += [
        "\r" * 5,
        "\r\n" * 7,
        " \n" * 9,
        "\n " * 9,
        "\t \n" * 6,
        "=" * 80,
        "-" * 33,
        "a" * 70,
        "0" * 40,
        "哈" * 20,
        "🦙" * 9,
        "!?" * 12,
    ]
    texts += [f"{number}" for number in (7, 42, 999, 1000, 31337, 123456789, 10**20)] + [
        "1 22 333 4444 55555",
        "v1.2.3-rc4",
        "2024-02-29T12:34:56Z",
    ]
    texts += [
        'def add(a: int, b: int) -> int:\n    """Adds."""\n    return a + b\n\n\nprint(add(1, 2))\n',
        'for (int i = 0; i < 10; ++i) {\n\t\tprintf("%d\\n", i);\n\t}\n',
        "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x%';",
        '{"key": [1, 2.5, null, true], "näme": "välue"}',
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "# Title\n\n- item\n  - nested\n\n```py\nx\n```\n",
    ]
    blocks = (
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x370, 0x530),
        (0x590, 0x700),
        (0x900, 0xE00),
        (0x2000, 0x2070),
        (0x20A0, 0x2400),
        (0x2500, 0x27C0),
        (0x3000, 0x3100),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0xFF01, 0xFFEE),
        (0x1F300, 0x1F650),
    )
    while len(texts) < 620:
        kind = draw.random()
        if kind < 0.75:
            text = "".join(
                draw.choice(WORDS) + draw.choice(SPACES if draw.random() < 0.5 else (" ",))
                for _ in range(draw.randint(1, 14))
            )
        else:
            text = "".join(
                chr(draw.randrange(*draw.choice(blocks))) + draw.choice(("", "", " ", "a", "B", "1"))
                for _ in range(draw.randint(1, 20))
            )
        texts.append(text)
    different = list(dict.fromkeys(text for text in texts if text))
    return different[:500]


class Vocabulary:
    """A vocabulary loaded by llama.cpp."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) * 4 + 16))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), room, len(room), False, False)
        return list(room[:count])

    def close(self) -> None:
        """Frees the vocabulary."""
        llama_cpp.llama_model_free(self.model)


def byte_characters() -> list[str]:
    """Returns the character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(0x100 + others.index(byte)) for byte in range(256)]


def pair_vocabulary() -> tuple[list[str], list[str]]:
    """Returns tokens and merges of a vocabulary in which any two neighbouring bytes merge.

    A trained vocabulary has no merges across the cuts of its own pre-tokenizer, so it cannot tell a pattern that cuts
    less; here every cut that is made or left out changes which bytes pair up.
    """
    single = byte_characters()
    pairs = [(left, right) for left in single for right in single]
    return [*single, *(left + right for left, right in pairs)], [f"{left} {right}" for left, right in pairs]


def gguf_bytes(pre: str) -> bytes:
    """Returns a tokenizer-only GGUF file of the pair vocabulary."""
    tokens, merges = pair_vocabulary()

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def texts(values: list[str]) -> bytes:
        return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(text(value) for value in values)

    string = struct.pack("<I", 8)
    entries = {
        "general.architecture": string + text("gpt2"),
        "tokenizer.ggml.model": string + text("gpt2"),
        "tokenizer.ggml.pre": string + text(pre),
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.token_type": struct.pack("<IIQ", 9, 5, len(tokens)) + struct.pack("<i", 1) * len(tokens),
        "tokenizer.ggml.merges": texts(merges),
        "gpt2.attention.layer_norm_epsilon": struct.pack("<If", 6, 1e-5),
    }
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        entries[f"gpt2.{key}"] = struct.pack("<II", 4, 64)
    for key in ("bos", "eos"):
        entries[f"tokenizer.ggml.{key}_token_id"] = struct.pack("<II", 4, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    return header + b"".join(text(key) + value for key, value in entries.items())


def digest(ids: list[int]) -> str:
    """Returns 8 hex digits for a list of ids."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()[:8]


def write(name: str, value: object) -> None:
    """Writes one data file, a line for each entry."""
    folder = DATA / "tokenizers"
    folder.mkdir(exist_ok=True)
    if isinstance(value, list):
        text = (
            "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=True, separators=(",", ":")) for entry in value) + "\n]\n"
        )
    else:
        text = json.dumps(value, indent=0, separators=(",", ":")) + "\n"
    (folder / name).write_text(text)


def main() -> None:
    """Writes all data files."""
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    texts = make_texts()
    write("texts.json", texts)
    for name, path in (("smollm2.json", Path(sys.argv[1])), ("spm.json", DATA / "vocab/ggml-vocab-llama-spm.gguf")):
        vocabulary = Vocabulary(path)
        write(name, [vocabulary.encode(text) for text in texts])
        vocabulary.close()
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = Path(folder) / "vocab.gguf"
            path.write_bytes(gguf_bytes(name))
            vocabulary = Vocabulary(path)
            digests[name] = " ".join(digest(vocabulary.encode(text)) for text in texts)
            vocabulary.close()
    distinct = sorted(set(digests.values()))
    write("pretokenizers.json", [{name: distinct.index(row) for name, row in digests.items()}, *distinct])


if __name__ == "__main__":
    main()
