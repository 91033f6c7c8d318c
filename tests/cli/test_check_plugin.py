"""`deepinfra check-plugin` tells parts that keep their laws from parts that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Home


def test_a_part_that_keeps_its_laws_passes(home: Home) -> None:
    done = home.run("check-plugin", "executor:toy")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "executor toy of deepinfra-serve 0.1.0"
    assert "  kept    chunks do not change the text" in lines
    assert lines[-1] == f"  {len(lines) - 2} kept, 0 broken"


def test_a_part_that_breaks_a_law_fails_and_the_law_is_named(home: Home) -> None:
    done = home.run("check-plugin", "forgetful", "--law", "computed in chunks")
    assert done.returncode == 1
    assert done.stdout.startswith("scheduler forgetful of tinyplug 2.0\n")
    assert "  BROKEN  a long prompt is computed in chunks: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("  laws are methods of deepinfra.testing.SchedulerConformance; one")


def test_a_broken_law_shows_what_was_raised_and_where_in_the_kit_and_in_the_plug_in(home: Home) -> None:
    done = home.run("check-plugin", "careless", "--law", "stops before what is missing")
    assert done.returncode == 1
    title, broken, *rest = done.stdout.splitlines()
    assert title == "kvstore careless of tinyplug 2.0"
    assert broken == "  BROKEN  a load stops before what is missing: KeyError: 'not here'"
    assert rest[0].endswith("[content(r.ref) for r in records[:2]]")
    assert "testing/kvstore.py:" in rest[0]
    assert rest[2].endswith('raise KeyError("not here")')
    assert "tinyplug.py:" in rest[2]
    assert rest[-2] == "  0 kept, 1 broken"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("no-store", "its factory returned a str, which is no KVStore; subclass deepinfra.interfaces.KVStore"),
        ("half", "cannot be made: TypeError: Can't instantiate abstract class Half"),
        ("tiered", "kvstore 'tiered' is made of others: check those, or subclass KVStoreConformance"),
    ],
)
def test_a_part_that_cannot_be_checked_is_told_once_and_why(home: Home, part: str, message: str) -> None:
    done = home.run("check-plugin", part)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_words_that_no_law_has_are_told(home: Home) -> None:
    done = home.run("check-plugin", "toy", "--law", "perpetual motion")
    assert done.returncode == 1
    assert "no law has the words 'perpetual motion'" in done.stderr


def test_a_store_is_checked_in_a_folder_of_its_own(home: Home) -> None:
    done = home.run("check-plugin", "ssd", "--option", "min_free_nbytes=0", "--law", "saved")
    assert done.returncode == 0, done.stdout
    assert "  kept    what was saved survives reopening iff persistent" in done.stdout
    assert list((home.folder.parent).rglob("*.kvseg")) == []


def test_a_wrong_option_is_refused_before_any_law(home: Home) -> None:
    done = home.run("check-plugin", "toy", "--option", "num_block=3")
    assert (done.returncode, done.stderr) == (1, "deepinfra: unknown setting num_block; did you mean 'num_blocks'?\n")


def test_an_unknown_part_lists_the_known_ones(home: Home) -> None:
    done = home.run("check-plugin", "scheduler:fcsf")
    assert done.stderr == "deepinfra: no scheduler is named 'fcsf'; known: bucketed, fcfs, forgetful\n"
