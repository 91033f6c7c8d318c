from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import deepinfra
from deepinfra.errors import ModelDownloadError, ModelError, ModelNotFoundError
from deepinfra.models import default_cache_dir, open_model, opened_once, pull


@pytest.mark.parametrize(
    "name", ["", "nothing", "./nothing", "/no/such/file.gguf", "~no-such-user/x", "a\0b", "a/b/c", "x" * 5000]
)
def test_a_name_that_means_nothing_is_not_found(name: str, cache_dir: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        open_model(name, cache_dir=cache_dir)
    assert "\n" not in str(caught.value)


def test_the_error_lists_the_catalogue(cache_dir: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        open_model("smollm3", cache_dir=cache_dir)


def test_a_folder_with_one_gguf_file_is_that_model(tiny: Any) -> None:
    path = tiny.gguf()
    assert open_model(str(tiny.folder)).path == path


def test_a_folder_with_two_gguf_files_is_ambiguous(tiny: Any) -> None:
    tiny.gguf()
    tiny.gguf(name="other.gguf")
    with pytest.raises(ModelError, match="name one"):
        open_model(str(tiny.folder))


def test_an_empty_folder_is_no_model(tiny: Any) -> None:
    with pytest.raises(ModelError, match="not a model folder"):
        open_model(str(tiny.folder))


def test_a_folder_called_like_a_catalogue_model_needs_a_path(
    tiny: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.hf_folder("smollm2")
    monkeypatch.chdir(tiny.folder)
    assert open_model("./smollm2").config["model_type"] == "llama"
    with pytest.raises(ModelDownloadError, match="offline"):
        open_model("smollm2", offline=True, cache_dir=cache_dir)


def test_a_path_is_its_own_pull(tiny: Any) -> None:
    path = tiny.gguf()
    assert pull(str(path)) == path


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/deepinfra/models")


def test_opening_a_model_loads_neither_torch_nor_pydantic(tiny: Any) -> None:
    code = (
        "import sys; from deepinfra.models import open_model; m = open_model(sys.argv[1]); m.tokenizer()\n"
        "print([name for name in ('torch', 'pydantic', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    root = Path(deepinfra.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, str(tiny.gguf())], cwd=root, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


def test_equal_bytes_have_equal_fingerprints_wherever_they_lie(tiny: Any, cache_dir: Path) -> None:
    path = tiny.gguf()
    copy = tiny.folder / "copy.gguf"
    shutil.copyfile(path, copy)
    first, second = (open_model(str(each), cache_dir=cache_dir).fingerprint() for each in (path, copy))
    assert first == second
    assert len(first) == 64


def test_a_changed_byte_changes_the_fingerprint_though_size_and_times_are_put_back(
    tiny: Any, tmp_path: Path, cache_dir: Path
) -> None:
    path = tiny.gguf()
    stat = path.stat()
    let_a_tick_pass(tmp_path)
    before = open_model(str(path), cache_dir=cache_dir).fingerprint()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_model(str(path), cache_dir=cache_dir).fingerprint() != before


def test_a_changed_config_changes_the_fingerprint(tiny: Any, cache_dir: Path) -> None:
    folders = [tiny.hf_folder("a"), tiny.hf_folder("b"), tiny.hf_folder("c", config={"rope_theta": 5})]
    first, same, other = (open_model(str(each), cache_dir=cache_dir).fingerprint() for each in folders)
    assert first == same
    assert first != other


class Counting:
    def __init__(self) -> None:
        self.started: list[str] = []
        self.nbytes = 0
        self.ended = 0

    def start(self, what: str, total: int | None) -> None:
        self.started.append(what)

    def advance(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def done(self) -> None:
        self.ended += 1


def let_a_tick_pass(folder: Path) -> None:
    """Waits, by the file system's own clock, until its stamps tell a later change from an earlier one."""
    probe = folder / "probe"
    probe.touch()
    begin = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns - begin < 40_000_000:
        probe.touch()


def test_a_fingerprint_is_hashed_once_and_then_remembered(tiny: Any, tmp_path: Path, cache_dir: Path) -> None:
    path, progress = tiny.gguf(), Counting()
    let_a_tick_pass(tmp_path)
    first = open_model(str(path), cache_dir=cache_dir, progress=progress).fingerprint()
    assert progress.nbytes == path.stat().st_size
    assert open_model(str(path), cache_dir=cache_dir, progress=progress).fingerprint() == first
    assert (len(progress.started), progress.ended) == (1, 1)


def test_a_damaged_sidecar_is_ignored(tiny: Any, tmp_path: Path, cache_dir: Path) -> None:
    path = str(tiny.gguf())
    let_a_tick_pass(tmp_path)
    first = open_model(path, cache_dir=cache_dir).fingerprint()
    sidecars = list((cache_dir / "fingerprints").iterdir())
    assert len(sidecars) == 1
    sidecars[0].write_text("[1]")
    assert open_model(path, cache_dir=cache_dir).fingerprint() == first


def test_a_cache_that_cannot_be_written_costs_no_more_than_time(tiny: Any, cache_dir: Path) -> None:
    path = str(tiny.gguf())
    cache_dir.write_text("a file where the folder should be")
    assert open_model(path, cache_dir=cache_dir).fingerprint() == open_model(path, cache_dir=cache_dir).fingerprint()


def test_smollm2_opens_and_builds_its_tokenizer_without_delay(smollm2_path: Path) -> None:
    # Processor time, because other programs may run beside the tests; both take about 0.15 s on a laptop.
    open_model(str(smollm2_path)).tokenizer()
    begin = time.process_time()
    model = open_model(str(smollm2_path))
    opened = time.process_time()
    model.tokenizer()
    built = time.process_time()
    assert opened - begin < 1.0
    assert built - opened < 1.5


def test_within_opened_once_a_name_opens_once(tiny: Any) -> None:
    one, other = str(tiny.gguf()), str(tiny.hf_folder())
    with opened_once():
        model = open_model(one)
        assert open_model(one) is model
        second = open_model(other)
        assert second is not model
        assert open_model(other) is second
        with opened_once():
            assert open_model(one) is not model
        assert open_model(one) is model
    assert open_model(one) is not model
