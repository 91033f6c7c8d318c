"""The commands that do not serve, as users run them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from deepinfra.cli.progress import nbytes_text, shown_progress

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Home


# -- generate and chat ----------------------------------------------------------------------------


def test_generate_prints_the_answer_and_nothing_else(home: Home) -> None:
    shown = home.run("generate", "Hello", "--temperature", "0", "--max-tokens", "5")
    told = home.run("generate", "Hello", "--temperature", "0", "--max-tokens", "5", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == json.loads(told.stdout)["text"] + "\n"


def test_generate_counts_in_its_json(home: Home) -> None:
    done = home.run("generate", "Hello", "--max-tokens", "5", "--seed", "3", "--json")
    answer = json.loads(done.stdout)
    assert (answer["seed"], answer["model"], answer["usage"]["prompt_tokens"]) == (3, "tiny", 8)


def test_the_same_seed_generates_the_same_text(home: Home) -> None:
    first, again, other = (
        home.run("generate", "Hello", "--max-tokens", "9", "--seed", seed).stdout for seed in ("3", "3", "4")
    )
    assert first == again
    assert first != other


def test_raw_continues_the_text_as_it_stands(home: Home) -> None:
    done = home.run("generate", "Hello", "--max-tokens", "5", "--raw", "--json")
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 6


def test_an_answer_goes_on_where_not_every_character_can_be_shown(home: Home) -> None:
    options = ("generate", "Hello", "--max-tokens", "40", "--seed", "1")
    whole = home.run(*options, PYTHONIOENCODING="utf-8").stdout
    assert not whole.isascii()
    done = home.run(*options, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == whole.encode("ascii", "replace").decode()


def test_generate_leaves_no_store_behind(home: Home) -> None:
    with open(home.folder / "deepinfra.toml", "a") as file:
        file.write('\n[pool.store]\nuse = "ssd"\n')
    assert home.run("generate", "Hello", "--max-tokens", "5").returncode == 0
    assert not os.path.exists(f"{home.environ['XDG_CACHE_HOME']}/deepinfra/kv")


def test_chat_answers_each_line_and_remembers_the_conversation(home: Home) -> None:
    options = ("--temperature", "0", "--max-tokens", "5")
    together = home.run("chat", *options, typed="Hello\nHello\n")
    alone = home.run("chat", *options, typed="Hello\n")
    assert (together.returncode, together.stderr) == (0, "")
    assert together.stdout.startswith(alone.stdout)
    assert together.stdout != 2 * alone.stdout


def test_chat_on_a_terminal_prompts_and_ends_with_control_d(home: Home) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "deepinfra", "chat", "--max-tokens", "3"]
    with subprocess.Popen(command, cwd=home.folder, env=home.environ, stdin=child, stdout=child, stderr=child):
        os.close(child)
        said = _read_until(parent, b"> ")
        os.write(parent, b"Hello\n")
        said += _read_until(parent, b"\n> ")
        os.write(parent, b"\x04")
        said += _read_until(parent, None)
    assert b"Ctrl-D ends" in said


def _read_until(fd: int, mark: bytes | None) -> bytes:
    said = b""
    while mark is None or not said.endswith(mark):
        try:
            piece = os.read(fd, 4096)
        except OSError:  # the other end is closed
            piece = b""
        if not piece:
            assert mark is None, said
            return said
        said += piece
    return said


# -- errors ---------------------------------------------------------------------------------------


def test_an_error_is_one_sentence(home: Home) -> None:
    done = home.run("generate", "Hello", DEEPINFRA_PRT="1")
    expected = "deepinfra: unknown setting prt; did you mean 'port'? (environment DEEPINFRA_PRT)\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_debug_shows_the_traceback(home: Home) -> None:
    done = home.run("--debug", "generate", "Hello", DEEPINFRA_PRT="1")
    assert "Traceback" in done.stderr
    assert "ConfigError: unknown setting prt" in done.stderr


def test_an_error_inside_the_engine_is_one_sentence_too(home: Home) -> None:
    done = home.run("generate", "x" * 5000)
    assert done.returncode == 1
    assert done.stderr.startswith("deepinfra: This model's maximum context length is 1024 tokens.")


@pytest.mark.parametrize("args", [("generate",), ("generate", "x", "--max-tokens", "0"), ("sreve",), ("pull",)])
def test_wrong_usage_exits_with_two(home: Home, args: tuple[str, ...]) -> None:
    assert home.run(*args).returncode == 2


def test_a_broken_plugin_is_named(home: Home) -> None:
    site = home.environ["PYTHONPATH"]
    with open(f"{site}/tinyplug.py", "a") as file:
        file.write("\nimport nothing_of_that_name\n")
    done = home.run("plugins")
    assert done.returncode == 1
    assert done.stderr.startswith("deepinfra: plug-in 'tinyplug' of tinyplug 2.0 cannot be loaded: ModuleNotFoundError")


NO_TORCH = """
import importlib.metadata, sys

def version(name, known=importlib.metadata.version):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

importlib.metadata.version = version
sys.modules["torch"] = None
"""


@pytest.fixture
def without_torch(home: Home) -> Home:
    """A place where torch is not installed, and the executor is torch's."""
    with open(f"{home.environ['PYTHONPATH']}/sitecustomize.py", "w") as file:
        file.write(NO_TORCH)
    (home.folder / "deepinfra.toml").write_text('[pool.executor]\nuse = "torch"\n')
    return home


def test_doctor_says_that_torch_is_missing_and_what_to_install(without_torch: Home) -> None:
    done = without_torch.run("doctor")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (1, "")
    assert ["fail", "torch", "not installed; install deepinfra-serve[torch]"] in lines
    assert any(what == "kernels" for _, what, _ in lines)


@pytest.mark.parametrize("args", [("generate", "Hello", "--model"), ("bench", "quality")])
def test_a_command_that_needs_torch_says_what_to_install(
    without_torch: Home, dense: Path, args: tuple[str, ...]
) -> None:
    done = without_torch.run(*args, str(dense), DEEPINFRA_POOL__EXECUTOR__KERNELS="torch")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("is not installed: install deepinfra-serve[torch]")
    assert "Traceback" not in done.stderr


def test_commands_that_a_newcomer_looks_for_are_in_the_help(home: Home) -> None:
    said = " ".join(home.run("--help").stdout.replace("│", " ").split())
    assert "replay Compute recorded answers again from their receipts" in said
    assert "verify-invariance Show that the batch-invariant mode answers alone as in a batch" in said
    assert "llama.cpp, vLLM and transformers (bench compare)" in said


# -- looking without starting ---------------------------------------------------------------------


def test_plugins_lists_origin_and_version(home: Home) -> None:
    done = home.run("plugins", "--json")
    rows = {(row["kind"], row["name"]): row for row in json.loads(done.stdout)}
    assert rows["executor", "slow-toy"]["distribution"] == "tinyplug"
    assert rows["executor", "slow-toy"]["version"] == "2.0"
    assert rows["scheduler", "bucketed"]["distribution"] == "deepinfra-serve"
    assert len(done.stdout) > len(home.run("plugins").stdout) > 0


def test_explain_tells_where_each_value_came_from(home: Home) -> None:
    done = home.run("explain", "--model", "other", "--json", DEEPINFRA_POOL__SCHEDULER__MAX_QUEUE="7")
    values = {value["name"]: value for value in json.loads(done.stdout)}
    origins = {
        "model": ("other", "command line"),
        "name": ("tiny", "deepinfra.toml:2"),
        "port": (8000, "default"),
        "pool.scheduler.use": ("bucketed", "default"),
        "pool.scheduler.max_queue": (7, "environment DEEPINFRA_POOL__SCHEDULER__MAX_QUEUE"),
        "pool.executor.num_blocks": (256, "deepinfra.toml:7"),
        "pool.executor.block_size": (4, "default of slow-toy"),
        "pool.executor.process": (False, "default of slow-toy"),
    }
    assert {name: (values[name]["value"], values[name]["origin"]) for name in origins} == origins


def test_explain_tells_what_auto_became_once_the_model_is_here(home: Home) -> None:
    (home.folder / "deepinfra.toml").unlink()
    done = home.run("explain")
    assert done.returncode == 0
    assert 'pool.executor.num_blocks = "auto" ' in done.stdout
    assert done.stderr.startswith("what auto becomes is unknown: model 'smollm2' is not in ")


def test_explain_prints_one_line_for_each_value(home: Home) -> None:
    lines = home.run("explain").stdout.splitlines()
    assert len(lines) == len(json.loads(home.run("explain", "--json").stdout))
    assert any(line.startswith("pool.executor.num_blocks = 256 ") and "# deepinfra.toml:7" in line for line in lines)


@pytest.mark.parametrize("command", ["--help", "serve --help", "explain", "plugins"])
def test_looking_loads_neither_torch_nor_a_web_framework(home: Home, command: str) -> None:
    check = (
        "import sys; sys.argv[0] = 'deepinfra'\n"
        "from deepinfra.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'torch', 'starlette', 'uvicorn', 'transformers', 'gguf'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    arguments = [sys.executable, "-c", check, *command.split()]
    done = subprocess.run(
        arguments, cwd=home.folder, env=home.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_loads_no_other(home: Home) -> None:
    check = (
        "import sys; sys.argv[0] = 'deepinfra'\n"
        "from deepinfra.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*(name for name in sys.modules if name in ('deepinfra.cli.serve', 'deepinfra.cli.bench')))\n"
    )
    serve = "deepinfra.cli.serve"
    for words, loaded in (("--debug serve --help", serve), ("nosuch", f"{serve} deepinfra.cli.bench")):
        arguments = [sys.executable, "-c", check, *words.split()]
        done = subprocess.run(
            arguments, cwd=home.folder, env=home.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.splitlines()[-1] == loaded
    assert "No such command 'nosuch'" in done.stderr


def test_doctor_says_one_line_for_each_thing(home: Home) -> None:
    done = home.run("doctor")
    assert done.returncode == 0, done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()].count("fail") == 0
    assert f"{home.environ['XDG_CACHE_HOME']}/deepinfra/kv" in done.stdout


def test_doctor_fails_where_the_cache_cannot_be_written(home: Home) -> None:
    blocked = home.folder / "file"
    blocked.write_text("a file where a folder should be")
    done = home.run("doctor", XDG_CACHE_HOME=str(blocked))
    assert done.returncode == 1
    assert "cannot be written" in done.stdout


# -- pull -----------------------------------------------------------------------------------------


def test_pull_prints_where_the_model_is(home: Home) -> None:
    model = home.folder / "model"
    model.mkdir()
    done = home.run("pull", str(model))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{model}\n", "")


def test_progress_is_a_few_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as progress:
        progress.start("model.gguf", 1000)
        for _ in range(100):
            progress.advance(10)
        progress.done()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "model.gguf: 1000 B"
    assert lines[1:-1] == [f"model.gguf: {percent} %" for percent in range(10, 100, 10)]
    assert lines[-1] == "model.gguf: 1000 B done"


def test_progress_is_a_bar_on_a_terminal(home: Home) -> None:
    code = (
        "from deepinfra.cli.progress import shown_progress\n"
        "with shown_progress() as p: p.start('model.gguf', 2048); p.advance(2048); p.done()\n"
    )
    parent, child = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], env=home.environ | {"TERM": "xterm"}, stderr=child):
        os.close(child)
        said = _read_until(parent, None).decode()
    assert "model.gguf" in said
    assert "━" in said
    assert "2.0/2.0 KiB" in said


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 * 2**20, "200 MiB"), (2**41, "2048 GiB")]
)
def test_byte_counts_are_short(nbytes: int, text: str) -> None:
    assert nbytes_text(nbytes) == text
