"""Collects fragments into CHANGELOG.md.

python changelog.d/build.py --check            say whether all fragments are well named and not empty
python changelog.d/build.py VERSION DATE       put them under a new heading, and remove them
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TYPES = ("added", "changed", "fixed", "removed")
FOLDER = Path(__file__).parent
CHANGELOG = FOLDER.parent / "CHANGELOG.md"

_NAME = re.compile(rf"(\d+)\.({'|'.join(TYPES)})(\.\d+)?\.md")
_MARK = "<!-- releases -->\n"


def fragments(folder: Path) -> dict[str, list[tuple[int, str, Path]]]:
    """By type: (issue, text, file), by issue.

    Raises:
        ValueError: A file is misnamed or empty.
    """
    found: dict[str, list[tuple[int, str, Path]]] = {kind: [] for kind in TYPES}
    for path in sorted(folder.glob("*.md")):
        name = _NAME.fullmatch(path.name)
        text = " ".join(path.read_text(encoding="utf-8").split())
        if name is None or not text:
            raise ValueError(f"{path.name}: a fragment is ISSUE.TYPE.md with a sentence; types: {', '.join(TYPES)}")
        found[name[2]].append((int(name[1]), text, path))
    return {kind: sorted(entries) for kind, entries in found.items()}


def section(found: dict[str, list[tuple[int, str, Path]]], version: str, date: str) -> str:
    """A release's part of the changelog."""
    lines = [f"## {version} ({date})", ""]
    for kind, entries in found.items():
        if entries:
            lines += [f"### {kind.capitalize()}", "", *(f"- {text} (#{issue})" for issue, text, _ in entries), ""]
    return "\n".join(lines) + "\n"


def build(folder: Path, changelog: Path, version: str, date: str) -> None:
    """Write a release into the changelog and remove its fragments."""
    found = fragments(folder)
    head, mark, releases = changelog.read_text(encoding="utf-8").partition(_MARK)
    if not mark:
        raise ValueError(f"{changelog.name} has no line {_MARK.strip()}")
    changelog.write_text(f"{head}{mark}\n{section(found, version, date)}{releases.lstrip()}", encoding="utf-8")
    for entries in found.values():
        for _, _, path in entries:
            path.unlink()


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    try:
        if argv == ["--check"]:
            sys.stdout.write(f"{sum(map(len, fragments(FOLDER).values()))} fragments\n")
        elif (
            len(argv) == 2 and re.fullmatch(r"\d+\.\d+\.\d+\S*", argv[0]) and re.fullmatch(r"\d{4}-\d\d-\d\d", argv[1])
        ):
            build(FOLDER, CHANGELOG, *argv)
        else:
            sys.stderr.write(f"{__doc__}")
            return 2
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
