"""The child of a process executor: `python -m deepinfra.config.child NAME OPTIONS_JSON FD`.

Only names and settings cross: the child loads the installed plug-ins itself and builds the executor from them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deepinfra.config.openmp import calm_openmp
from deepinfra.errors import DeepinfraError, UnknownComponentError
from deepinfra.executors.process import serve_child
from deepinfra.registry import load_plugins

__all__ = ("main",)


def main(argv: Sequence[str]) -> int:
    """Build the executor and serve it until the parent is gone.

    Args:
        argv: Name of the executor, its options as JSON, number of the socket.
    """
    name, options, fd = argv
    calm_openmp()
    try:
        registry = load_plugins()
        entry = registry.executors.get(name)
        if entry is None:
            raise UnknownComponentError("executor", name, tuple(registry.executors))
        executor = entry.build(entry.options.model_validate_json(options))
    except DeepinfraError as error:
        sys.stderr.write(f"deepinfra: the executor's process cannot start: {error}\n")
        return 1
    serve_child(executor, int(fd))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
