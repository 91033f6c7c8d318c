"""Every snippet of the README and the docs is run, checked, or shown to be part of a file that is.

The word behind a fence's language says how:

    python run              a whole program; a `text output` fence behind it is what it prints
    python file=NAME        written to NAME in the page's folder, for later snippets
    python from=PATH        part of that file of the repository, which has tests of its own
    toml check, file=NAME   a whole configuration, accepted by `deepinfra explain`
    toml data=NAME          written to NAME: what a configuration refers to
    console run             `$ ` lines are run, the others are what they print; `...` stands for anything
    console server          one command, left running for the rest of the page
    console make            targets of the Makefile; not run here: CI runs them
    console install         `pip install -e PATH` by other means; anything else is not run
    json, text              data and drawings; JSON is parsed

Pages run in a folder of their own with some of the repository's folders in it. 127.0.0.1:8000 is replaced by
the address that the server got.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
]
ADDRESS = "127.0.0.1:8000"
NEVER_RUN = ("git clone ", "cd ", "pip install ", ".venv/bin/pip install ")


class Snippet(NamedTuple):
    """A fence: its language, the words behind it, what is inside, and its line."""

    language: str
    mode: str
    text: str
    line: int

    @property
    def file(self) -> str:
        return self.mode.partition("=")[2]


def snippets(page: Path) -> list[Snippet]:
    found: list[Snippet] = []
    info, inside, begun = "", [], 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            inside.append(line)
        elif not begun:
            info, inside, begun = line[3:].strip(), [], number
        else:
            language, _, mode = info.partition(" ")
            found.append(Snippet(language, mode, "\n".join(inside) + "\n", begun))
            begun = 0
    assert not begun, f"{page}:{begun}: a fence that never ends"
    return found


def fuzzy(expected: str) -> re.Pattern[str]:
    """`...` stands for anything; spaces at the ends of lines do not count."""
    lines = [line.rstrip() for line in expected.strip().splitlines()]
    return re.compile(".*".join(map(re.escape, "\n".join(lines).split("..."))), re.DOTALL)


def commands(text: str) -> list[tuple[str, str]]:
    """(command, expected output) of a console snippet; a command may go on behind a backslash."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append([line[2:], ""])
        else:
            found[-1][1] += line + "\n"
    return [(command, output) for command, output in found]


@contextmanager
def server(command: str, outside: Any) -> Iterator[str]:
    """A server started by `command`; gives its address once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = shlex.split(command)
    if words[0] == "uvicorn":
        words += ["--port", str(port)]
    process = subprocess.Popen(
        words,
        cwd=outside.folder,
        env=outside.environ | {"DEEPINFRA_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                        break
                except (OSError, urllib.error.HTTPError):
                    assert process.poll() is None, process.communicate()[0]
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate(timeout=60)


class Player:
    """Plays a page's snippets in order."""

    def __init__(self, outside: Any, plain_server: Callable[[], str], stack: ExitStack) -> None:
        self.outside, self.plain_server, self.stack = outside, plain_server, stack
        self.address, self.printed = ADDRESS, ""
        for name in ("changelog.d", "examples", "plugins"):
            (outside.folder / name).symlink_to(ROOT / name)

    def play(self, snippet: Snippet) -> None:
        text = snippet.text.replace(ADDRESS, self.address)
        match snippet.language, snippet.mode.partition("=")[0]:
            case "python", "run":
                self.printed = self.run(sys.executable, "-c", text)
            case "text", "output":
                assert fuzzy(text).fullmatch(self.printed.strip()), self.printed
            case ("python", "file") | ("toml", "data"):
                self.write(snippet.file, text)
            case "python" | "toml", "from":
                assert text.strip() in (ROOT / snippet.file).read_text(), f"not in {snippet.file}"
            case "toml", "check":
                self.write("checked.toml", text)
                self.run("deepinfra", "explain", "--config", "checked.toml")
            case "toml", "file":
                self.write(snippet.file, text)
                self.run("deepinfra", "explain", "--config", snippet.file)
            case "console", "run":
                for command, expected in commands(text):
                    printed = self.run("bash", "-euo", "pipefail", "-c", command)
                    if expected:
                        assert fuzzy(expected).fullmatch(printed.strip()), f"{command}\n{printed}"
            case "console", "server":
                ((command, _),) = commands(text)
                if (
                    command in ("make serve", "deepinfra serve")
                    and not (self.outside.folder / "deepinfra.toml").exists()
                ):
                    self.address = self.plain_server()
                else:
                    self.address = self.stack.enter_context(server(command, self.outside))
            case "console", "make":
                for command, _ in commands(text):
                    words = [word for word in shlex.split(command, comments=True) if "=" not in word]
                    assert words[0] == "make"
                    subprocess.run([*words, "-n"], cwd=ROOT, check=True, capture_output=True)
            case "console", "install":
                for command, _ in commands(text):
                    assert command.startswith(NEVER_RUN), command
                    if (project := command.partition("pip install -e ")[2]) and project != ".":
                        self.outside.install(self.outside.folder / project)
            case "json", "":
                json.loads(text)
            case "text", "":
                pass
            case _:
                pytest.fail(f"a fence '{snippet.language} {snippet.mode}' says not how it is checked")

    def write(self, name: str, text: str) -> None:
        path = self.outside.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *command: str) -> str:
        done = self.outside.run(*command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        output: str = done.stdout
        return output


@pytest.fixture(scope="module")
def plain_server(make_outside: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """The address of `deepinfra serve` without options; started when first asked for, one for all pages."""
    with ExitStack() as stack:

        @cache
        def address() -> str:
            return stack.enter_context(server("deepinfra serve", make_outside(tmp_path_factory.mktemp("server"))))

        yield address


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_do_what_the_page_says(
    page: Path, plain_server: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    found = snippets(page)
    if not found:
        return
    outside = request.getfixturevalue("outside")
    with ExitStack() as stack:
        player = Player(outside, plain_server, stack)
        for snippet in found:
            try:
                player.play(snippet)
            except (AssertionError, ValueError, subprocess.SubprocessError) as error:
                pytest.fail(f"{page.relative_to(ROOT)}:{snippet.line}: {error}")


def test_the_readme_shows_the_smallest_server_whole() -> None:
    source = (ROOT / "examples" / "minimal_server.py").read_text().partition("\n\n")[2]
    assert len(source.splitlines()) == 9
    assert source in [snippet.text for snippet in snippets(ROOT / "README.md")]


def test_the_check_can_fail(outside: Any) -> None:
    bad = [
        Snippet("python", "", "", 1),
        Snippet("python", "run", "1 / 0\n", 1),
        Snippet("python", "from=examples/minimal_server.py", "no such line\n", 1),
        Snippet("toml", "check", "no_such_key = 1\n", 1),
        Snippet("console", "run", "$ echo one\ntwo\n", 1),
        Snippet("console", "install", "$ rm -r everything\n", 1),
        Snippet("json", "", "{\n", 1),
    ]
    with ExitStack() as stack:
        player = Player(outside, lambda: ADDRESS, stack)
        for snippet in bad:
            with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
                player.play(snippet)
    assert shutil.which("deepinfra", path=outside.environ["PATH"])
