"""`deepinfra check-plugin` tells parts that keep their laws from parts that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    done = home.run("check-plugin", "forgetful")
    assert done.returncode == 1
    assert done.stdout.startswith("scheduler forgetful of tinyplug 2.0\n")
    assert "  BROKEN  a long prompt is computed in chunks: " in done.stdout


def test_a_store_is_checked_in_a_folder_of_its_own(home: Home) -> None:
    done = home.run("check-plugin", "ssd", "--option", "min_free_nbytes=0")
    assert done.returncode == 0, done.stdout
    assert "  kept    what was saved survives reopening iff persistent" in done.stdout
    assert list((home.folder.parent).rglob("*.kvseg")) == []


def test_a_wrong_option_is_refused_before_any_law(home: Home) -> None:
    done = home.run("check-plugin", "toy", "--option", "num_block=3")
    assert (done.returncode, done.stderr) == (1, "deepinfra: unknown setting num_block; did you mean 'num_blocks'?\n")


def test_an_unknown_part_lists_the_known_ones(home: Home) -> None:
    done = home.run("check-plugin", "scheduler:fcsf")
    assert done.stderr == "deepinfra: no scheduler is named 'fcsf'; known: bucketed, fcfs, forgetful\n"
