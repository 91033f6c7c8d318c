"""Fetches models from the Hugging Face hub, or from whatever `HF_ENDPOINT` names, file by file with resume.

The files go into the hub package's own cache, so that a model other tools have fetched is not fetched again.
"""

from __future__ import annotations

import errno
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import huggingface_hub as hf
from huggingface_hub import errors as hf_errors
from huggingface_hub.file_download import http_get, repo_folder_name

from deepinfra.errors import ModelDownloadError, ModelNotFoundError, UnsupportedModelError
from deepinfra.models.cache import locked, publish
from deepinfra.models.fingerprint import file_sha256
from deepinfra.models.folder import read_json, refuse_remote_code
from deepinfra.models.safetensors_file import INDEX, indexed_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deepinfra.models.records import Progress

__all__ = ("pull_from_hub",)

_MAX_CONFIG_BYTES = 16 * 2**20
_MISTRALS = ("tekken.json", *(f"tokenizer.model.v{number}" for number in (1, 2, 3, 7)))
_SMALL_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *_MISTRALS)
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the hub's ETag of a large file; that of a small one is a git hash
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def pull_from_hub(name: str, cache_dir: Path | None, progress: Progress, *, offline: bool) -> Path:
    """Returns the local folder of a hub model, or the file of a GGUF model, fetching what is missing.

    Args:
        name: `org/name`, or `org/name/file.gguf`.
        cache_dir: Holds the hub cache in its folder `hub`; None for the hub package's own folder.
        progress: Told about every file.
        offline: Only look into the cache.

    Raises:
        ModelNotFoundError: The hub has no such model or file.
        ModelDownloadError: The hub cannot be reached, refuses, or the disk is full.
        UnsupportedModelError: The model has no weights that can be read here, or brings its own code.
        ModelError: A fetched file is damaged.
    """
    org, model, *rest = name.split("/")
    fetch = _Fetch(f"{org}/{model}", str(cache_dir / "hub") if cache_dir else None, progress)
    wanted = rest[0] if rest else "config.json"
    if offline:
        return fetch.cached(wanted, whole=not rest) or fetch.absent_offline()
    with fetch.explained():
        try:
            listing = fetch.listing()
        except (hf_errors.HfHubHTTPError, hf_errors.HFValidationError):
            raise
        except (hf_errors.HTTPError, hf_errors.OfflineModeIsEnabled, OSError):
            # No network, but it may be here: then a restart without network works.
            if found := fetch.cached(wanted, whole=not rest):
                return found
            raise
        if rest:
            return fetch.file(rest[0])
        if "config.json" not in listing:
            return fetch.only_gguf(listing)
        return fetch.folder(listing)


class _Fetch:
    """One model on the hub."""

    def __init__(self, repo: str, cache_dir: str | None, progress: Progress) -> None:
        self.repo, self.cache_dir, self.progress = repo, cache_dir, progress

    def listing(self) -> frozenset[str]:
        siblings = hf.HfApi().model_info(self.repo).siblings or []
        return frozenset(str(sibling.rfilename) for sibling in siblings)

    def cached(self, file: str, *, whole: bool) -> Path | None:
        found = hf.try_to_load_from_cache(self.repo, file, cache_dir=self.cache_dir)
        if not isinstance(found, str):
            return None
        return Path(found).parent if whole else Path(found)

    def absent_offline(self) -> NoReturn:
        raise ModelDownloadError(
            f"model {self.repo!r} is not on this machine and may not be fetched offline: "
            f"run `deepinfra pull {self.repo}` first"
        )

    def file(self, name: str, revision: str | None = None) -> Path:
        if name.endswith((".safetensors", ".gguf")):
            self._weights_file(name, revision)
        path = hf.hf_hub_download(
            self.repo, name, revision=revision, cache_dir=self.cache_dir, tqdm_class=_bar(self.progress, name)
        )
        return Path(path)

    def _weights_file(self, name: str, revision: str | None) -> None:
        """Puts a large file among the blobs of the hub cache, where the hub package then finds it.

        The package itself starts a file again after a failed run (since 1.0 its partial files have random names).
        Here a partial file is kept under the file's hash, continued by the next run, and checked against the hash.
        """
        url = hf.hf_hub_url(self.repo, name, revision=revision)
        about = hf.get_hf_file_metadata(url)
        by_chunks = getattr(about, "xet_file_data", None) is not None and hf.utils.is_xet_available()
        if by_chunks or about.etag is None or about.size is None:
            return  # the package's chunk store resumes by itself; without a size nothing can be resumed
        root = Path(self.cache_dir or hf.constants.HF_HUB_CACHE)
        folder = root / repo_folder_name(repo_id=self.repo, repo_type="model")
        blob = folder / "blobs" / about.etag
        partial = blob.with_name(f"{about.etag}.deepinfra.incomplete")
        if blob.exists():
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        with locked(root / ".locks" / folder.name, f"{about.etag}.deepinfra"):
            if blob.exists():
                return
            with partial.open("ab") as file:
                done = file.tell()
                if done > about.size:
                    file.truncate(0)
                    done = 0
                http_get(
                    url,
                    file,
                    resume_size=done,
                    headers=hf.utils.build_hf_headers(),
                    expected_size=about.size,
                    tqdm_class=_bar(self.progress, name),
                )
            if _SHA256.fullmatch(about.etag) and file_sha256(partial) != about.etag:
                partial.unlink()
                raise ModelDownloadError(f"{name} of {self.repo} arrived damaged (its SHA-256 is wrong); run it again")
            publish(partial, blob)

    def only_gguf(self, listing: frozenset[str]) -> Path:
        files = sorted(file for file in listing if file.endswith(".gguf") and "/" not in file)
        if len(files) == 1:
            return self.file(files[0])
        if files:
            raise ModelNotFoundError(f"{self.repo} holds {len(files)} GGUF files: name one, as {self.repo}/{files[0]}")
        raise ModelNotFoundError(f"{self.repo} is on the hub but holds no config.json and no GGUF file")

    def folder(self, listing: frozenset[str]) -> Path:
        # The config is first: what is refused is refused before gigabytes are fetched. The rest is taken from the same
        # commit, so that a push in between cannot mix two versions.
        config = self.file("config.json")
        refuse_remote_code(read_json(config, _MAX_CONFIG_BYTES), "config.json")
        commit = config.parent.name
        for name in self._weights(listing, commit):
            self.file(name, commit)
        for name in _SMALL_FILES:
            if name in listing:
                self.file(name, commit)
        return config.parent

    def _weights(self, listing: frozenset[str], commit: str) -> Sequence[str]:
        if INDEX in listing:
            return indexed_shards(self.file(INDEX, commit))
        if "model.safetensors" in listing:
            return ["model.safetensors"]
        files = sorted(file for file in listing if "/" not in file)
        if len(found := [file for file in files if file.endswith(".safetensors")]) == 1:
            return found
        for file in files:
            if file.endswith(_PICKLES):
                raise UnsupportedModelError(
                    "weights", file, "is a pickle file, which can run code when read; use a safetensors version"
                )
        raise ModelNotFoundError(f"{self.repo} is on the hub but holds no safetensors weights")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the errors of the hub package into sentences that say what to do."""
        try:
            yield
        except hf_errors.GatedRepoError as error:
            raise ModelDownloadError(
                f"{self.repo} asks for an agreement: accept it on the model's page and log in with `hf auth login`"
            ) from error
        except hf_errors.EntryNotFoundError as error:
            raise ModelNotFoundError(f"{self.repo} is on the hub but lacks a file it needs: {_first(error)}") from error
        except hf_errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            if status == 404:
                raise ModelNotFoundError(f"the hub has no model {self.repo!r}: check the spelling") from error
            if status in (401, 403):
                raise ModelDownloadError(
                    f"the hub does not show {self.repo!r} to you: check the spelling, "
                    "or log in with `hf auth login` if it is private"
                ) from error
            raise ModelDownloadError(
                f"the hub answered with status {status} for {self.repo!r}; try again later"
            ) from error
        except hf_errors.HFValidationError as error:
            raise ModelNotFoundError(f"{self.repo!r} is no hub id: {_first(error)}") from error
        except hf_errors.HTTPError as error:
            raise self._unreachable(error) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise ModelDownloadError(
                    f"the disk is full while fetching {self.repo}; free some and run it again"
                ) from error
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise ModelDownloadError(f"the cache folder cannot be written: {error}") from error
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ModelDownloadError:
        return ModelDownloadError(
            f"{self.repo} could not be fetched from the hub ({_first(error)}): check the network and HF_ENDPOINT, "
            "then run it again, it goes on where it stopped"
        )


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _bar(progress: Progress, name: str) -> type:
    """Returns a progress bar class of the kind the hub package takes, which draws nothing and tells `progress`."""
    base: Any = hf.utils.tqdm

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self._open = True
            total = kwargs.get("total")
            progress.start(name, int(total) if total else None)
            if kwargs.get("initial"):
                progress.advance(int(kwargs["initial"]))

        def update(self, n: float | None = 1) -> None:
            progress.advance(max(0, int(n or 0)))

        def close(self) -> None:
            super().close()
            if getattr(self, "_open", False):
                self._open = False
                progress.done()

    return Bar
