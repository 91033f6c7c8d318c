"""Builds the libraries, once for each state of sources, flags, compiler and torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from deepinfra_kernels.cpu import PATHS

__all__ = ("BuildError", "build", "cached", "fingerprint", "intact", "why_not")

_SOURCES: Final = Path(__file__).parent / "csrc"

# No -march=native: a cache folder may travel. No -ffast-math and no contraction: sums keep the order that is written.
_FLAGS: Final = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=off", "-Wall")

_PATH_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"),
        *("-mavx2", "-mfma", "-mf16c"),
    ),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}

_COMPILERS: Final = ("g++", "clang++", "c++")

_KEPT: Final = 16
"""Libraries kept in a cache folder, the latest: two for each of the last few states of the sources."""

_PATIENCE_S: Final = 600.0
"""Given to a compiler, beside whom others may wait; it takes half a minute."""

_BUILDING: Final = "build-"
_WRITING: Final = "part-"
"""How names of a folder and a file under way begin; both are made with the lock of the cache."""

_SHOWN: Final = 6
"""Lines of a compiler's complaint that an error carries; the first ones say what is wrong."""

_WIDTH: Final = 400
"""Characters of such a line."""


class BuildError(Exception):
    """A library could not be built; the text says why, with the compiler's first lines."""


def build(
    path: str, cache: Path, *, compiler: str | None = None, tell: Callable[[str], None] = lambda line: None
) -> Path:
    """Gives the file of a path's library, building it unless it is in the cache.

    What is in the cache is found without starting the compiler, also where there is none any more. Of several processes
    one builds and the others wait for it. A library ends with the SHA-256 of what comes before, so that one that was
    cut short or changed is seen before it is loaded, and built again.

    Args:
        path: A name of `cpu.PATHS`; the CPU need not run it.
        cache: A folder, made if needed, that only its owner writes to: its files are executed.
        compiler: A program; default: the first found of g++, clang++ and c++.
        tell: Is told in one line when a build begins, or another's is waited for, which takes long.

    Raises:
        BuildError: There is no compiler, it failed, or the folder cannot be written, or is one that others write to.
    """
    stem = _stem(path)
    if doubt := _not_ours(cache):
        raise BuildError(doubt)
    program = _find(compiler)
    try:
        if program is None:
            if (found := cached(path, cache)) is not None:
                return found
            raise BuildError(_no_compiler(compiler))
        target = cache / f"{stem}-{_digest(_version(Path(program), cache).encode())[:8]}.so"
        if intact(target):
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache, tell):
            if not intact(target):
                _clear(cache)
                tell(f"building the {path} kernels with {program}: half a minute or more, this once")
                _compile(program, path, target)
                _forget_old(cache)
    except OSError as error:
        raise BuildError(f"{error.filename or cache}: {error.strerror or error}") from error
    return target


def fingerprint(path: str) -> str:
    """Digest of all that decides what a path's library computes: sources, flags and torch's version; needs no build."""
    return _stem(path).removeprefix(f"{path}-")


def why_not(path: str, cache: Path, *, compiler: str | None = None) -> str:
    """Why `build` would fail at once; empty if it has a library, or a compiler and a place to write. Starts nothing."""
    if doubt := _not_ours(cache):
        return doubt
    if cached(path, cache):
        return ""
    return _unwritable(cache) if _find(compiler) else _no_compiler(compiler)


def cached(path: str, cache: Path) -> Path | None:
    """A library that was built from these very sources, by whichever compiler; `None` if there is none."""
    found = sorted(cache.glob(f"{_stem(path)}-*.so"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return next(filter(intact, found), None)


def intact(file: Path) -> bool:
    """Whether a library can be read and is as it was built: its last 32 bytes are the SHA-256 of the others."""
    try:
        data = file.read_bytes()
    except OSError:
        return False
    return len(data) > 32 and hashlib.sha256(data[:-32]).digest() == data[-32:]


def _find(compiler: str | None) -> str | None:
    return shutil.which(compiler) if compiler else next(filter(None, map(shutil.which, _COMPILERS)), None)


def _no_compiler(compiler: str | None) -> str:
    looked_for = (compiler,) if compiler else _COMPILERS
    missing = f"{looked_for[0]} is not" if len(looked_for) == 1 else f"none of {', '.join(looked_for)} is"
    return f"there is no C++ compiler: {missing} installed"


def _not_ours(cache: Path) -> str:
    """Why files of a folder are not to be executed: somebody else could have put them there; empty if nobody could."""
    try:
        stat = cache.stat()
    except OSError:
        return ""  # it has no files yet, or building tells what is wrong with it
    if stat.st_uid not in (os.geteuid(), 0):
        return f"{cache} belongs to another user, who could put any code there"
    return f"{cache} can be written by everyone: chmod o-w it" if stat.st_mode & 0o002 else ""


def _unwritable(cache: Path) -> str:
    """Why nothing can be built into a folder that may not exist yet; empty if it can."""
    existing = next(folder for folder in (cache.absolute(), *cache.absolute().parents) if os.access(folder, os.F_OK))
    fine = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return "" if fine else f"nothing is built, and {cache} cannot be written"


def _torch_version() -> str:
    """Empty where torch is not installed: kernels call nothing of it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _stem(path: str) -> str:
    """A path's name with a digest of all that decides what is built, except the compiler."""
    if path not in PATHS:
        raise ValueError(f"{path!r} is not a path; known: {', '.join(PATHS)}")
    digest = hashlib.sha256()
    for file in sorted(_SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            digest.update(f"{file.name}\n".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    digest.update(" ".join((*_FLAGS, *_PATH_FLAGS[path], _torch_version())).encode())
    return f"{path}-{digest.hexdigest()[:24]}"


def _version(program: Path, cache: Path) -> str:
    """The first line of `--version`, noted in the cache under the program's stat: asking costs a process."""
    real = program.resolve()
    stat = real.stat()
    note = cache / f"compiler-{_digest(f'{real} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}'.encode())[:16]}.txt"
    if note.exists() and (noted := note.read_text("utf-8", "surrogateescape")).isprintable() and noted:
        return noted
    said = _run([str(program), "--version"])
    version = _shown(said.stdout.partition("\n")[0].strip())
    if said.returncode or not version:
        raise BuildError(f"{program} --version failed: {_first_lines(said.stderr)}")
    with suppress(OSError):  # a folder that cannot be written may hold a library all the same
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache):
            _publish(version.encode(), note)
    return version


def _compile(program: str, path: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_BUILDING) as folder:
        made = Path(folder) / "library.so"
        flags = (*_FLAGS, *_PATH_FLAGS[path])
        said = _run([program, *flags, "-o", str(made), str(_SOURCES / "library.cpp")])
        if said.returncode:
            raise BuildError(f"{program} failed on the {path} kernels:\n{_first_lines(said.stderr)}")
        data = made.read_bytes()
    _publish(data + hashlib.sha256(data).digest(), target)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} did not end within {_PATIENCE_S:g} s") from None


def _publish(data: bytes, target: Path) -> None:
    """Writes a file that appears whole or not at all; with the folder's lock."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_WRITING)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)  # to be run by others who share the folder
            file.write(data)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


def _clear(cache: Path) -> None:
    """Deletes what builds left that were killed; with the folder's lock, so that nobody is at it."""
    for name in (_BUILDING, _WRITING):
        for left in cache.glob(f"{name}*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _forget_old(cache: Path) -> None:
    libraries = sorted(cache.glob("*.so"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in libraries[_KEPT:]:
        file.unlink(missing_ok=True)


@contextmanager
def _locked(cache: Path, tell: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Holds a folder against other processes and threads; the kernel lets go of it when its holder dies."""
    handle = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for another process that builds kernels into {cache}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _first_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(map(_shown, lines[:_SHOWN]))


def _shown(line: str) -> str:
    """The beginning of a program's line, with nothing in it that a terminal would obey."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line[:_WIDTH])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
