"""A model in a Hugging Face folder: `config.json`, safetensors, `tokenizer.json`."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from deepinfra.errors import ModelError, UnsupportedModelError
from deepinfra.models.fingerprint import fingerprint_of
from deepinfra.models.records import JsonValue, Model, Progress, SpecialTokens
from deepinfra.models.safetensors_file import SafeTensors, find_shards

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ("FolderModel", "read_json", "refuse_remote_code")

# The largest real ones: a config.json of 0.2 MB, a tokenizer.json of 35 MB, a chat template of 60 kB.
_MAX_CONFIG_BYTES = 16 * 2**20
_MAX_TOKENIZER_BYTES = 256 * 2**20
_MAX_TEMPLATE_BYTES = 4 * 2**20
_REMOTE_CODE = ("auto_map", "trust_remote_code", "custom_pipelines")


class FolderModel(Model):
    """A model in a folder as it lies on the hub.

    Args:
        name: The name it was asked for by.
        path: The folder.
        cache_dir: Where the fingerprint is remembered.
        progress: Told about the fingerprint's progress.

    Raises:
        ModelError: A file is missing or damaged.
        UnsupportedModelError: The weights are pickled, or the model brings its own code.
    """

    def __init__(self, name: str, path: Path, cache_dir: Path, progress: Progress) -> None:
        self.name, self.path = name, path
        self._cache_dir, self._progress = cache_dir, progress
        self.config = read_json(path / "config.json", _MAX_CONFIG_BYTES)
        refuse_remote_code(self.config, "config.json")
        self._shards = find_shards(path)
        self.tensors = SafeTensors(path, self._shards)

    def tokenizer(self) -> Tokenizer:
        """Loads `tokenizer.json`."""
        path = self.path / "tokenizer.json"
        refuse_remote_code(self._tokenizer_config, "tokenizer_config.json")
        try:
            text = read_text(path, _MAX_TOKENIZER_BYTES)
            return Tokenizer.from_str(text)
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises nothing more precise
            raise ModelError(f"{path} is damaged or too new for the tokenizers package: {error}") from error

    def chat_template(self) -> str | None:
        """Returns `chat_template.jinja`, else the default template of `tokenizer_config.json`."""
        path = self.path / "chat_template.jinja"
        if path.exists():
            return read_text(path, _MAX_TEMPLATE_BYTES)
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{self.path / 'tokenizer_config.json'} is damaged: its chat_template is no text")
        return template

    def special_tokens(self) -> SpecialTokens:
        """Returns the special tokens that tokenizer, config and generation config name."""
        return self._special

    def generation_defaults(self) -> Mapping[str, JsonValue]:
        """Returns the content of `generation_config.json`."""
        return self._generation_config

    def fingerprint(self) -> str:
        """Returns the hash of all shards and `config.json`."""
        return fingerprint_of(self._shards, self.config, self._cache_dir, self._progress)

    @cached_property
    def _tokenizer_config(self) -> Mapping[str, JsonValue]:
        path = self.path / "tokenizer_config.json"
        return read_json(path, _MAX_CONFIG_BYTES) if path.exists() else {}

    @cached_property
    def _generation_config(self) -> Mapping[str, JsonValue]:
        path = self.path / "generation_config.json"
        return read_json(path, _MAX_CONFIG_BYTES) if path.exists() else {}

    @cached_property
    def _special(self) -> SpecialTokens:
        tokenizer = self.tokenizer()
        added = tokenizer.get_added_tokens_decoder()
        control = {token for token, about in added.items() if about.special}
        texts = {name: self._token_text(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        ids = {name: None if text is None else tokenizer.token_to_id(text) for name, text in texts.items()}
        ends: set[int] = set()
        for source in (self.config, self._generation_config):
            value = source.get("eos_token_id")
            found = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in found):
                raise ModelError(f"{self.path} is damaged: eos_token_id is {value!r}")
            ends.update(token for token in found if isinstance(token, int))
        eos = ids["eos_token"]
        if eos is not None:
            ends.add(eos)
        control |= ends | {token for token in ids.values() if token is not None}
        bos = ids["bos_token"]
        return SpecialTokens(
            bos_id=bos,
            eos_id=eos if eos is not None else min(ends, default=None),
            unk_id=ids["unk_token"],
            pad_id=ids["pad_token"],
            eos_ids=frozenset(ends),
            control_ids=frozenset(control),
            marker_ids=frozenset(set(added) - control),
            add_bos=bos is not None and tokenizer.encode("").ids[:1] == [bos],
            bos_token=texts["bos_token"],
            eos_token=texts["eos_token"],
        )

    def _token_text(self, name: str) -> str | None:
        value = self._tokenizer_config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.path / 'tokenizer_config.json'} is damaged: its {name} is no text")
        return value


def refuse_remote_code(config: Mapping[str, JsonValue], file: str) -> None:
    """Refuses a model that wants code of its own to run.

    Raises:
        UnsupportedModelError: `config` has a field that names code.
    """
    for field in _REMOTE_CODE:
        if config.get(field):
            raise UnsupportedModelError(
                f"{file}: {field}", config[field], "names code that comes with the model, which is never run here"
            )


def read_text(path: Path, limit: int) -> str:
    """Reads a text file of at most `limit` bytes.

    Raises:
        ModelError: It is missing, larger, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ModelError(f"{path} is larger than {limit} bytes, which no such file needs")
        return data.decode()
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is incomplete: {path.name} is missing; download it again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ModelError(f"{path} is damaged: it is not UTF-8; download it again") from None


def read_json(path: Path, limit: int) -> dict[str, JsonValue]:
    """Reads a JSON object of at most `limit` bytes.

    Raises:
        ModelError: It is missing, larger, or no JSON object.
    """
    try:
        value = json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: it is no JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object")
    return value
