"""What an opened model consists of: its description, its tensors and its special tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

__all__ = ("JsonValue", "Model", "Progress", "SpecialTokens", "TensorInfo", "TensorSource")

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


class Progress(Protocol):
    """Is told about long work (a download, hashing); every method is called often and must be cheap.

    The calls of one `start` … `done` come from one thread at a time, which need not be the caller's.
    """

    def start(self, what: str, total: int | None) -> None:
        """Announces work on `what`, a name for people; `total` is in bytes, None when unknown."""

    def advance(self, nbytes: int) -> None:
        """Says that `nbytes` more bytes are done."""

    def done(self) -> None:
        """Says that the work announced last has ended, well or not."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it.

    Attributes:
        dtype: "F32", "F16", "BF16", "I8", … or the name of a ggml block format such as "Q4_1".
        shape: Row-major, in Hugging Face order: a linear layer is `[out, in]`.
        nbytes: Size of the stored bytes, which for a block format is not elements times element size.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TensorSource(Protocol):
    """Gives a model's weights by their Hugging Face names; nothing is read before it is asked for.

    Thread-safe. The bytes are mapped from the file: a file that is overwritten in place (not replaced by a rename)
    while it is open gives undefined weights, and one that is cut short kills the process.
    """

    def names(self) -> Sequence[str]:
        """Returns every tensor's name, in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Returns the header's description of a tensor.

        Raises:
            ModelError: There is no tensor of that name.
        """
        ...

    def raw(self, name: str) -> memoryview:
        """Returns the stored bytes (format "B", `info(name).nbytes` long), rows in Hugging Face order.

        The view is of a private mapping: it stays valid as long as it is held, and writing to it changes neither the
        file nor what other processes see.

        Raises:
            ModelError: There is no tensor of that name.
        """
        ...

    def read(self, name: str) -> NDArray[np.float32]:
        """Returns a tensor as float32 of `info(name).shape`, decoded from whatever it is stored in.

        Raises:
            ModelError: There is no tensor of that name.
            UnsupportedModelError: It is stored in a format that cannot be decoded here.
        """
        ...

    def release(self) -> None:
        """Gives back the memory of what was read; views stay valid and read the file anew, without what was written."""
        ...


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that mean something to the model beyond their text.

    Attributes:
        bos_id: Token that begins a text, None when the model has none.
        eos_id: Token that ends a text, the model's first choice.
        unk_id: Token for what the vocabulary cannot spell.
        pad_id: Token that fills unused positions.
        eos_ids: Every id that ends a generation: `eos_id`, the end-of-turn tokens, those of `generation_config.json`.
        control_ids: Ids that text typed by a user must never become.
        marker_ids: Ids of added tokens that are ordinary text to the model's own tokenizer (`<tool_call>`), so they
            are found in any text, also with `encode_special_tokens` set; a recipe decides whether it trusts them.
        add_bos: Whether `encode(..., add_special_tokens=True)` puts `bos_id` in front.
        bos_token: Text of `bos_id` as a chat template uses it, None when the model has none.
        eos_token: Text of `eos_id`.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    control_ids: frozenset[int] = frozenset()
    marker_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    bos_token: str | None = None
    eos_token: str | None = None


class Model(ABC):
    """An opened model: its headers are read and checked, its weights are not.

    Attributes:
        name: The name it was opened by.
        path: The folder or file it lives in.
        config: Content of a Hugging Face `config.json`; for a GGUF file it is made from the file's metadata.
        tensors: The weights, under Hugging Face names.
    """

    name: str
    path: Path
    config: Mapping[str, JsonValue]
    tensors: TensorSource

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Returns the model's own tokenizer, a new object on each call (the caller may change its settings).

        It parses control tokens in text, as the model's authors ship it. Set `encode_special_tokens = True` on it to
        encode text typed by a user: then no text becomes one of `special_tokens().control_ids`.

        Raises:
            ModelError: The tokenizer's files are missing or damaged.
            UnsupportedModelError: The tokenizer is of a kind that cannot be reproduced exactly.
        """

    @abstractmethod
    def chat_template(self) -> str | None:
        """Returns the Jinja source of the model's chat template, None when it has none.

        Raises:
            ModelError: The file that holds it is damaged.
        """

    @abstractmethod
    def special_tokens(self) -> SpecialTokens:
        """Returns the special tokens.

        Raises:
            ModelError: The tokenizer's files are missing or damaged.
        """

    @abstractmethod
    def generation_defaults(self) -> Mapping[str, JsonValue]:
        """Returns the content of `generation_config.json`, empty when the model has none.

        Raises:
            ModelError: The file is damaged.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns 64 hex digits of SHA-256 over the weight bytes and the config, whatever the path.

        Reads every byte of the weights the first time (seconds per gigabyte: call it off the event loop) and keeps
        the answer in the cache folder under each file's size, modification time and inode.

        Raises:
            ModelError: A file cannot be read.
        """
