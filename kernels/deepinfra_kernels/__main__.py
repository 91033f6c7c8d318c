"""`python -m deepinfra_kernels FOLDER` builds into a cache folder every path that this CPU runs."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepinfra_kernels.build import BuildError, build
from deepinfra_kernels.cpu import paths


def main(arguments: list[str]) -> int:
    """Builds; a build that fails is told and is no failure of an installation, for torch alone computes as well."""
    if len(arguments) != 1:
        _tell("usage: python -m deepinfra_kernels FOLDER")
        return 2
    cache = Path(arguments[0]).expanduser()

    def attempt(path: str) -> None:
        try:
            build(path, cache, tell=_tell)
        except BuildError as error:
            _tell(f"no {path} kernels: {error}")

    with ThreadPoolExecutor() as threads:
        list(threads.map(attempt, paths()))
    return 0


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
