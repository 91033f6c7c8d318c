"""Requests and answers as lines of JSON on standard input and output: what every side of a comparison speaks.

Standard library only: peers import it in interpreters of their own, where deepinfra is not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

__all__ = ("answer_lines", "options", "own_output")


def options() -> dict[str, object]:
    """What the side was started with: one JSON object as its only argument."""
    given: dict[str, object] = json.loads(sys.argv[1])
    return given


def own_output() -> TextIO:
    """Standard output for answers alone: what the program or its libraries print goes to standard error instead."""
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return wire


def answer_lines(
    wire: TextIO, name: str, about: Mapping[str, str], calls: Mapping[str, Callable[..., dict[str, object]]]
) -> None:
    """Say who answers, then answer until standard input ends; blocks.

    Args:
        wire: From `own_output`, called before anything could print.
        name: The program and its version.
        about: What it says about itself.
        calls: What it can be asked, by name.
    """

    def say(answer: Mapping[str, object]) -> None:
        wire.write(json.dumps(answer) + "\n")
        wire.flush()

    say({"name": name, "about": dict(about)})
    for line in sys.stdin:
        request = json.loads(line)
        say(calls[request.pop("do")](**request))
