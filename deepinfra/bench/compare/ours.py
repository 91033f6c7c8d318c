"""Our side of a comparison: an engine in a process of its own, asked as any peer is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from anyio.from_thread import start_blocking_portal

from deepinfra import __version__
from deepinfra.bench.compare.peers.lines import answer_lines, options, own_output
from deepinfra.bench.offline import Measured
from deepinfra.bench.recorder import Recorder
from deepinfra.config import Blueprint, read_settings, resolve
from deepinfra.config.openmp import calm_openmp
from deepinfra.engine import Engine, Pool
from deepinfra.engine.collapse import collapsed
from deepinfra.errors import DeepinfraError
from deepinfra.interfaces.given import SystemClock
from deepinfra.registry import load_plugins

_DEFAULTS: dict[str, object] = {"pool": {"store": {"use": "none"}, "executor": {"process": False}}}


def main() -> None:
    """Serve the lines; options are `config` (a path or null), `model` and `executor`.

    What is wrong with these or with a request is the last line on standard error, as with any program.
    """
    wire = own_output()
    calm_openmp()
    given = options()
    keywords = {"model": given["model"], "pool": {"executor": given["executor"]}}
    config = given["config"]
    try:
        settings, provenance = read_settings(
            Path(str(config)) if config else None, keywords=keywords, keywords_from="bench compare", defaults=_DEFAULTS
        )
        with collapsed():
            _answer(wire, resolve(settings, load_plugins(), provenance))
    except DeepinfraError as error:
        sys.exit(str(error))


def _answer(wire: TextIO, blueprint: Blueprint) -> None:
    assert blueprint.pool is not None  # `bench compare` looked
    parts = blueprint.pool.build()
    recorder = Recorder(parts.executor)
    pool = Pool(parts.scheduler, recorder, store=parts.store, speculator=parts.speculator, placer=parts.placer)
    engine = Engine(blueprint.recipe.build(), pool, name=blueprint.name)
    measured = Measured(engine, recorder, SystemClock())
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine):

        def prefill(prompt: list[int]) -> dict[str, object]:
            return {"seconds": portal.call(measured.prefill, tuple(prompt))}

        def decode(prompts: list[list[int]], new: int) -> dict[str, object]:
            steps, firsts = portal.call(measured.decode, [tuple(prompt) for prompt in prompts], new)
            return {"seconds": steps.wall_s, "tokens": steps.tokens, "firsts": firsts}

        about = {"kv_dtype": recorder.identity.kv_dtype, **parts.executor.explain()}
        answer_lines(wire, f"deepinfra {__version__}", about, {"prefill": prefill, "decode": decode})


if __name__ == "__main__":
    main()
