"""Libraries are built once for what decides them, and a cache is believed only as far as it can be checked."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deepinfra_kernels import build as building
from deepinfra_kernels import cpu
from deepinfra_kernels.__main__ import main
from deepinfra_kernels.build import BuildError, build, cached, intact, why_not
from deepinfra_kernels.library import load

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library that compiles in no time, in place of the kernels."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "library.cpp").write_text(SOURCE)
    monkeypatch.setattr(building, "_SOURCES", folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str], str]:
    """Makes a compiler that does something before it compiles, and notes each start."""

    def make(script: str) -> str:
        program = tmp_path / "compiler"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\n{script}\nexec g++ "$@"\n')
        program.chmod(0o755)
        return str(program)

    return make


def starts(folder: Path) -> int:
    """How often that compiler was started."""
    return len((folder / "starts").read_text().splitlines()) if (folder / "starts").exists() else 0


def answer(file: Path) -> int:
    return int(ctypes.CDLL(str(file)).answer())


def test_what_is_built_can_be_loaded_and_is_told_of_once(sources: Path, cache: Path) -> None:
    told: list[str] = []
    file = build("avx2", cache, tell=told.append)
    assert answer(file) == 42
    assert build("avx2", cache, tell=told.append) == file
    (line,) = told
    assert "avx2" in line


def test_a_cached_library_is_found_without_starting_the_compiler(
    sources: Path, cache: Path, compiler: Callable[[str], str], tmp_path: Path
) -> None:
    program = compiler("")
    file = build("avx2", cache, compiler=program)
    assert starts(tmp_path) == 2  # its version, and the library
    assert build("avx2", cache, compiler=program) == file
    assert starts(tmp_path) == 2


@pytest.mark.parametrize("change", ["a source", "a header", "a flag", "torch", "the compiler"])
def test_whatever_decides_a_library_changes_its_name(
    sources: Path, cache: Path, compiler: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    program = compiler("")
    before = build("avx2", cache, compiler=program)
    match change:
        case "a source":
            (sources / "library.cpp").write_text(SOURCE + "// changed\n")
        case "a header":
            (sources / "more.h").write_text("// new\n")
        case "a flag":
            monkeypatch.setitem(building._PATH_FLAGS, "avx2", (*building._PATH_FLAGS["avx2"], "-DMORE"))
        case "torch":
            monkeypatch.setattr(building.importlib.metadata, "version", lambda name: "99.1")
        case _:
            program = compiler('[ "$1" = --version ] && echo "g++ 99" && exit')
    after = build("avx2", cache, compiler=program)
    assert after != before
    assert answer(before) == answer(after) == 42


def test_a_machine_without_torch_has_libraries_of_its_own(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise building.importlib.metadata.PackageNotFoundError(name)

    with_torch = build("avx2", cache)
    monkeypatch.setattr(building.importlib.metadata, "version", missing)
    without = build("avx2", cache)
    assert without != with_torch
    assert answer(without) == 42


def test_each_path_has_a_library_of_its_own(sources: Path, cache: Path) -> None:
    assert build("avx2", cache) != build("avx512", cache)
    with pytest.raises(ValueError, match="not a path"):
        build("sse", cache)


@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty"])
def test_a_damaged_library_is_built_again(sources: Path, cache: Path, damage: str) -> None:
    file = build("avx2", cache)
    data = bytearray(file.read_bytes())
    file.unlink()  # another file, for one that is loaded must not change under its process
    if damage == "one bit":
        data[len(data) // 2] ^= 1
    file.write_bytes(data[: {"cut short": len(data) // 2, "one bit": len(data), "empty": 0}[damage]])
    assert not intact(file)
    assert cached("avx2", cache) is None
    assert build("avx2", cache) == file
    assert answer(file) == 42


def test_of_two_builders_at_once_one_builds(
    sources: Path, cache: Path, compiler: Callable[[str], str], tmp_path: Path
) -> None:
    program = compiler("")
    build("avx512", cache, compiler=program)  # so that its version is known
    before = starts(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        files = set(threads.map(lambda _: build("avx2", cache, compiler=program), range(4)))
    assert len(files) == 1
    assert starts(tmp_path) == before + 1
    assert answer(files.pop()) == 42


def test_who_waits_for_another_build_says_so(sources: Path, cache: Path) -> None:
    build("avx512", cache)  # so that nothing else needs the lock
    told: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(1) as threads:
        with building._locked(cache):
            waiting = threads.submit(build, "avx2", cache, tell=told.put)
            assert told.get(timeout=30) == f"waiting for another process that builds kernels into {cache}"
            assert not waiting.done()
        assert answer(waiting.result()) == 42
    assert told.get_nowait().startswith("building the avx2 kernels")


def test_what_killed_builds_left_is_deleted_by_the_next_one(
    sources: Path, cache: Path, compiler: Callable[[str], str], tmp_path: Path
) -> None:
    script = (
        "import sys; from pathlib import Path; from deepinfra_kernels import build as b\n"
        "b._SOURCES = Path(sys.argv[1]); b.build('avx512', Path(sys.argv[2]), compiler=sys.argv[3])"
    )
    os.mkfifo(tmp_path / "begun")
    stuck = compiler(f'[ "$1" = --version ] || {{ echo $$ > {tmp_path}/begun; exec sleep 600; }}')
    builder = subprocess.Popen([sys.executable, "-c", script, str(sources), str(cache), stuck])
    compiling = int((tmp_path / "begun").read_text())
    builder.kill()
    builder.wait()
    os.kill(compiling, signal.SIGKILL)
    (cache / "part-of-a-library").write_bytes(b"half")
    assert list(cache.glob("build-*"))
    assert answer(build("avx2", cache)) == 42  # of another path
    assert not list(cache.glob("build-*"))
    assert not list(cache.glob("part-*"))


def test_a_builder_in_another_process_is_waited_for(sources: Path, cache: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from deepinfra_kernels import build as b\n"
        "b._SOURCES = Path(sys.argv[1]); print(b.build('avx2', Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", script, str(sources), str(cache)]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {other.communicate()[0].strip() for other in others}
    assert said == {str(build("avx2", cache))}


def test_a_build_that_fails_says_what_the_compiler_says_and_leaves_nothing(sources: Path, cache: Path) -> None:
    (sources / "library.cpp").write_text("int broken(\n" * 50)
    with pytest.raises(BuildError, match=r"avx2 kernels:\n.*library\.cpp") as failure:
        build("avx2", cache)
    assert len(str(failure.value).splitlines()) <= 7
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob("build-*"))


def test_a_compiler_that_prints_garbage_is_told_of_in_a_few_harmless_lines(
    sources: Path, cache: Path, compiler: Callable[[str], str]
) -> None:
    garbage = "printf '\\033]0;owned\\007\\377' >&2; head -c 3000000 /dev/zero | tr '\\0' E >&2; exit 1"
    with pytest.raises(BuildError, match="owned") as failure:
        build("avx2", cache, compiler=compiler(f'[ "$1" = --version ] || {{ {garbage}; }}'))
    said = str(failure.value)
    assert len(said) < 1000
    assert all(line.isprintable() for line in said.splitlines())


@pytest.mark.parametrize("noted", [b"", b"\xff\xfe\x80", b"\0\0\0\0"])
def test_a_damaged_note_of_the_compilers_version_is_written_again(sources: Path, cache: Path, noted: bytes) -> None:
    file = build("avx2", cache)
    (note,) = cache.glob("compiler-*.txt")
    version = note.read_bytes()
    note.write_bytes(noted)
    assert build("avx2", cache) == file
    assert note.read_bytes() == version


def test_without_a_compiler_only_what_is_cached_is_to_be_had(sources: Path, cache: Path) -> None:
    assert "not-there is not installed" in why_not("avx2", cache, compiler="not-there")
    with pytest.raises(BuildError, match="not-there is not installed"):
        build("avx2", cache, compiler="not-there")
    file = build("avx2", cache)
    assert build("avx2", cache, compiler="not-there") == file
    assert why_not("avx2", cache, compiler="not-there") == ""


def test_a_folder_that_cannot_be_written_is_known_before_a_compiler_starts(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert why_not("avx2", tmp_path / "new" / "folder") == ""
    assert why_not("avx2", tmp_path / "file" / "folder").endswith("cannot be written")


def test_nothing_is_executed_from_a_folder_that_others_could_write_to(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("avx2", cache)
    cache.chmod(0o777)
    assert why_not("avx2", cache) == f"{cache} can be written by everyone: chmod o-w it"
    with pytest.raises(BuildError, match="can be written by everyone"):
        build("avx2", cache)
    cache.chmod(0o755)
    assert build("avx2", cache)
    owner = cache.stat().st_uid
    if owner == 0:  # root's folder is everybody's to trust
        os.chown(cache, 12345, -1)
        owner = 12345
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "belongs to another user" in why_not("avx2", cache)
    with pytest.raises(BuildError, match="belongs to another user"):
        build("avx2", cache)


def test_compilers_that_were_looked_for_are_named(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert why_not("avx2", cache).endswith("none of g++, clang++, c++ is installed")


def test_a_compiler_that_does_not_end_is_given_up(
    sources: Path, cache: Path, compiler: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_PATIENCE_S", 0.2)
    with pytest.raises(BuildError, match=r"did not end within 0\.2 s"):
        build("avx2", cache, compiler=compiler('[ "$1" = --version ] || exec sleep 60'))


def test_a_library_can_be_read_by_others_and_found_where_nothing_can_be_written(
    sources: Path, cache: Path, compiler: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = build("avx2", cache, compiler=compiler(""))
    assert file.stat().st_mode & 0o777 == 0o644
    for note in cache.glob("compiler-*.txt"):
        note.unlink()

    def refuse(data: bytes, target: Path) -> None:
        raise PermissionError(13, "Read-only file system", str(target))

    monkeypatch.setattr(building, "_publish", refuse)
    assert build("avx2", cache, compiler=compiler("")) == file


def test_a_library_without_our_functions_is_an_error_that_names_it(sources: Path, cache: Path) -> None:
    with pytest.raises(OSError, match=r"avx2-.*is no library of kernels"):
        load("avx2", cache)


def test_a_folder_that_cannot_be_made_is_named(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BuildError, match="file"):
        build("avx2", tmp_path / "file" / "cache")


def test_old_libraries_go(sources: Path, cache: Path) -> None:
    cache.mkdir()
    for age in range(30):
        (cache / f"old-{age}.so").write_bytes(b"")
        os.utime(cache / f"old-{age}.so", (1000 - age, 1000 - age))
    file = build("avx2", cache)
    assert file.exists()
    assert len(list(cache.glob("*.so"))) == 16


def test_installation_goes_on_where_nothing_can_be_built(
    sources: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "library.cpp").write_text("#error no such thing\n")
    assert main([str(cache)]) == 0
    said = capsys.readouterr().err
    assert all(f"no {path} kernels" in said for path in cpu.paths())
    assert "no such thing" in said
    assert main([]) == 2


def test_a_path_that_the_cpu_lacks_is_not_offered(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx2 fma\n")
    assert cpu.why_not("avx2", info) == "this CPU lacks f16c"
    assert "avx512f" in cpu.why_not("avx512", info)
    info.write_text("processor : 0\nflags : fpu avx2 fma f16c\n")
    assert cpu.why_not("avx2", info) == ""
    assert cpu.why_not("avx2", tmp_path / "none").endswith("does not say what this CPU can do")


def test_importing_kernels_loads_no_torch() -> None:
    script = "import sys, deepinfra_kernels.library; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
