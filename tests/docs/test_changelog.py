"""Fragments are well formed, and a release collects them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changelog_build", ROOT / "changelog.d" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_fragments_are_well_formed(builder: ModuleType) -> None:
    builder.fragments(ROOT / "changelog.d")


@pytest.mark.parametrize(("name", "text"), [("two.added.md", "x"), ("2.new.md", "x"), ("2.added.md", " \n")])
def test_a_bad_fragment_is_refused(builder: ModuleType, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        builder.fragments(tmp_path)


def test_a_release_collects_fragments_above_older_ones_and_removes_them(builder: ModuleType, tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    shutil.copy(ROOT / "CHANGELOG.md", changelog)
    for version, name in (("9.0.0", "7.fixed.md"), ("9.1.0", "12.added.md")):
        folder = tmp_path / version
        folder.mkdir()
        (folder / name).write_text("A thing\nchanged.\n")
        builder.build(folder, changelog, version, "2030-01-01")
        assert list(folder.iterdir()) == []
    text = changelog.read_text().partition("<!-- releases -->\n\n")[2]
    assert text.startswith("## 9.1.0 (2030-01-01)\n\n### Added\n\n- A thing changed. (#12)\n\n## 9.0.0 (2030-01-01)\n")
