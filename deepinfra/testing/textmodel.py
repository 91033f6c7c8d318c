"""A model without weights: a tokenizer trained on the spot and a chat template, for tests of recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram

from deepinfra.models import SpecialTokens

__all__ = ("CHATML", "TrainedTextModel")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The plainest template in wide use."""

_WORDS = (
    "the user asked about weather in Paris and what the answer to a question is",
    "system assistant tool function call name arguments type string object required properties",
    'def main(): return {"city": "Paris", "temp": 20}\n\n    for x in range(10):\n        print(x)',
    "Ünïcödé 日本語 テスト 🙂 don't I'll we've 12 + 30 = 42 <b>html</b> [list] {dict} (tuple)",
    "im start end header id eot think user_id <| |> </ > < [ ] INST /INST",
)


class TrainedTextModel:
    """What `ChatTemplate` needs of a model, made from a template and its markers.

    Args:
        template: Jinja source; `None` for a model without one.
        markers: Spellings of its control tokens; the first is BOS, the second ends an answer.
        kind: `byte-level` is the GPT-2 family's scheme, `sentencepiece` Llama's (spaces as `▁`, bytes for the rest),
            `unigram` T5's and Gemma's: pieces by likelihood, a space before the first word only.
        add_bos: Whether its tokenizer puts BOS before bare text.
        special: Whether the markers have the `special` flag that many real ones lack.
        folded: Whether text is normalised (NFKC, lower case) before markers are looked for in it.
    """

    def __init__(
        self,
        template: str | None = CHATML,
        markers: Sequence[str] = ("<|begin|>", "<|im_end|>", "<|im_start|>"),
        *,
        kind: Literal["byte-level", "sentencepiece", "unigram"] = "byte-level",
        add_bos: bool = False,
        special: bool = True,
        folded: bool = False,
        name: str = "trained",
    ) -> None:
        self.name = name
        self._template, self._add_bos = template, add_bos
        tokenizer = tokenizers.Tokenizer.from_str(_trained(kind))
        if folded:
            folds = [normalizers.NFKC(), normalizers.Lowercase()]
            tokenizer.normalizer = normalizers.Sequence([*filter(None, (tokenizer.normalizer,)), *folds])
        tokenizer.add_tokens([AddedToken(marker, special=special, normalized=folded) for marker in markers])
        self._definition = tokenizer.to_str()
        self._markers = tuple(markers)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        ids = [vocab[marker] for marker in markers]
        self._special = SpecialTokens(
            bos_id=ids[0],
            eos_id=ids[1],
            eos_ids=frozenset((ids[1],)),
            control_ids=frozenset(ids) if special else frozenset(),
            marker_ids=frozenset() if special else frozenset(ids),
            add_bos=add_bos,
            bos_token=markers[0],
            eos_token=markers[1],
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Spellings of the control tokens."""
        return self._markers

    def tokenizer(self) -> tokenizers.Tokenizer:
        """A new object of the model's own tokenizer, which parses markers in text."""
        return tokenizers.Tokenizer.from_str(self._definition)

    def chat_template(self) -> str | None:
        """The template."""
        return self._template

    def special_tokens(self) -> SpecialTokens:
        """The special tokens."""
        return self._special


@lru_cache(maxsize=3)
def _trained(kind: str) -> str:
    """A `tokenizer.json` without added tokens."""
    if kind == "unigram":
        return _unigram()
    model = BPE(byte_fallback=kind == "sentencepiece", fuse_unk=False)
    tokenizer = tokenizers.Tokenizer(model)
    if kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=[AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)],
            show_progress=False,
        )
    tokenizer.train_from_iterator(_WORDS * 4, trainer)
    if kind == "sentencepiece":
        return _without_added(tokenizer.to_str())
    return tokenizer.to_str()


def _unigram() -> str:
    tokenizer = tokenizers.Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.UnigramTrainer(vocab_size=500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(_WORDS * 4, trainer)
    definition = json.loads(tokenizer.to_str())
    model = definition["model"]
    model["vocab"] += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    model |= {"byte_fallback": True, "unk_id": 0}
    return json.dumps({**definition, "added_tokens": []})


def _without_added(definition: str) -> str:
    """Byte pieces are entries of the vocabulary, not added tokens."""
    return json.dumps({**json.loads(definition), "added_tokens": []})
