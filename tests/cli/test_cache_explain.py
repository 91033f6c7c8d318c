"""Why a prompt misses, found out from a folder that real engines filled."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from deepinfra.cli import app
from deepinfra.cli.cache.explain import _asker, _document, _Explained, _spec
from deepinfra.cli.cache.folder import Place
from deepinfra.cli.cache.held import Held, Twin
from deepinfra.core.request import GenerateRequest, TextInput
from deepinfra.engine import Engine, Pool
from deepinfra.engine.explain import Explanation, explanation_of
from deepinfra.errors import ConfigError, RequestError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.interfaces.given import SystemClock
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.census import take_census
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.tiny import TinyRecipe

ASKED = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
BLOCK = 8
HOUR_S = 3600.0


class OtherRecipe(TinyRecipe):
    """The same tokens by other rules."""

    @property
    def version(self) -> str:
        return "tiny-2"


def pool_with(store: SsdStore | None = None, **options: Any) -> Pool:
    settings = {"num_blocks": 64, "block_size": BLOCK, "vocab_size": 260, **options}
    return Pool(Fcfs(), ToyExecutor(**settings), store=store)


def ask(
    folder: Path, *texts: str, tenant: str = "public", salt: str = "", recipe: TinyRecipe | None = None, **options: Any
) -> None:
    """Let an engine answer, whose store is in the folder."""

    async def run() -> None:
        store = SsdStore(folder, min_free_nbytes=0, fsync="none")
        async with Engine(recipe or TinyRecipe(), pool_with(store, **options)) as engine:
            for text in texts:
                request = GenerateRequest(input=TextInput(text), max_tokens=1, tenant=tenant, salt=salt)
                async with engine.generate(request) as stream:
                    assert [event async for event in stream]
            assert await engine.drain(30)

    anyio.run(run)


def explained(
    folder: Path, text: str = ASKED, *, tenant: str = "public", salt: str = "", later_s: float = 0.0, **options: Any
) -> tuple[Explanation, list[Twin]]:
    """What the folder says of a prompt."""
    recipe, now = TinyRecipe(), SystemClock().wall() + later_s
    held = Held(folder, take_census(folder, now), now)
    ids = recipe.text(TextInput(text)).ids
    asker = _asker(pool_with(**options), recipe, _spec(ids, tenant, salt, 0))
    return explanation_of(held.miss(asker), ids, recipe), held.twins(asker)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ask(tmp_path / "kv", ASKED)
    return tmp_path / "kv"


def test_a_prompt_that_is_held_whole(folder: Path) -> None:
    explanation, twins = explained(folder)
    assert explanation.why == "all-held"
    assert explanation.held_tokens == explanation.prompt_tokens // BLOCK * BLOCK
    (tier,) = explanation.tiers
    assert (tier.tier, tier.count) == ("ssd", explanation.held_tokens // BLOCK)
    assert 0 <= tier.age_s < HOUR_S
    assert twins == []


@pytest.mark.parametrize("at", [0, 6, 7, 8, 30, 55])
def test_the_first_token_that_differs_is_told_with_what_is_around_it(folder: Path, at: int) -> None:
    explanation, _ = explained(folder, ASKED[:at] + "#" + ASKED[at + 1 :])
    assert explanation.why == "differs"
    assert explanation.differs is not None
    position = at + 1  # behind BOS
    assert explanation.differs.position == position
    assert explanation.held_tokens == position // BLOCK * BLOCK
    assert ("<[256]>" + ASKED[:at]).endswith(explanation.differs.before)
    assert explanation.differs.asked == ("#" + ASKED[at + 1 :])[:16]
    assert ASKED[at:].startswith(explanation.differs.held)
    assert len(explanation.differs.held) >= min(BLOCK, len(ASKED) - at - BLOCK)
    assert "#" in explanation.words


def test_a_prompt_that_goes_on_is_not_held_from_there(folder: Path) -> None:
    explanation, _ = explained(folder, ASKED + " And on, and on.")
    assert explanation.why == "never-seen"
    assert explanation.held_tokens == (len(ASKED) + 1) // BLOCK * BLOCK
    assert "goes on from there" in explanation.words


def test_a_prompt_that_is_too_short(folder: Path) -> None:
    explanation, _ = explained(folder, ASKED[:5])
    assert explanation.why == "too-short"
    assert "blocks of 8 tokens" in explanation.words


def test_another_tenants_blocks_are_told_as_such(folder: Path) -> None:
    explanation, (twin,) = explained(folder, tenant="somebody")
    assert explanation.why == "never-seen"
    assert (twin.owner.tenant, twin.tokens) == ("public", len(ASKED) // BLOCK * BLOCK)
    assert "only the tenant differs" in twin.differs


def test_behind_a_public_prefix_the_namespace_told_is_the_tenants_own(folder: Path) -> None:
    ids, now = TinyRecipe().text(TextInput(ASKED)).ids, SystemClock().wall()
    held = Held(folder, take_census(folder, now), now)

    def namespace(public: int) -> object:
        asker = _asker(pool_with(), TinyRecipe(), _spec(ids, "acme", "", public))
        explanation = explanation_of(held.miss(asker), ids, TinyRecipe())
        return _document(Place(folder, {}), _Explained(explanation, asker, []))["namespace"]

    assert namespace(3 * BLOCK) == namespace(0)


def test_a_salt_is_told_as_such(folder: Path) -> None:
    explanation, (twin,) = explained(folder, salt="pepper")
    assert explanation.why == "never-seen"
    assert "only the salt differs" in twin.differs


@pytest.mark.parametrize(
    ("options", "words"),
    [({"block_size": 16}, "blocks of 8 tokens there, of 16 here"), ({"seed": 7}, "the weights, the template")],
    ids=["block size", "weights"],
)
def test_other_namespaces_are_told_by_what_shows_of_them(folder: Path, options: dict[str, Any], words: str) -> None:
    explanation, (twin,) = explained(folder, **options)
    assert explanation.why == "never-seen"
    assert words in twin.differs


def test_another_recipe_is_another_namespace(tmp_path: Path) -> None:
    ask(tmp_path, ASKED, recipe=OtherRecipe())
    explanation, (twin,) = explained(tmp_path)
    assert explanation.why == "never-seen"
    assert "the template or tokenizer" in twin.differs


def test_what_expired_is_told_as_expired(folder: Path) -> None:
    explanation, twins = explained(folder, later_s=25 * HOUR_S)
    assert (explanation.why, explanation.held_tokens, twins) == ("expired", 0, [])


def test_a_hole_in_a_chain_was_evicted(tmp_path: Path) -> None:
    """Blocks behind it are there, and were never saved without it."""
    ask(tmp_path / "one", ASKED)

    async def without_third() -> None:
        async with SsdStore(tmp_path / "one") as one, SsdStore(tmp_path / "two") as two:
            from deepinfra.kvstores.ssd.listing import list_records, read_listed

            listed = [read_listed(tmp_path / "one", record) for record in list_records(tmp_path / "one")]
            await two.save([record for index, record in enumerate(listed) if record is not None and index != 2])
            assert one.stats().records == two.stats().records + 1

    anyio.run(without_third)
    explanation, _ = explained(tmp_path / "two")
    assert (explanation.why, explanation.held_tokens) == ("evicted", 2 * BLOCK)


def test_a_damaged_block_is_told_as_damaged(folder: Path) -> None:
    (file,) = folder.glob("*.kvseg")
    data = bytearray(file.read_bytes())
    third = [at for at in range(len(data)) if data.startswith(data[:4], at)][2]
    data[third + 300] ^= 1
    file.write_bytes(data)
    explanation, _ = explained(folder)
    assert (explanation.why, explanation.held_tokens) == ("damaged", 2 * BLOCK)


def test_windows_without_a_snapshot_are_told(tmp_path: Path) -> None:
    ask(tmp_path, ASKED, windows=(4, 4))
    explanation, _ = explained(tmp_path, ASKED[:40] + "something else", windows=(4, 4))
    assert explanation.why == "differs"
    assert "window layers begin only where a snapshot" in explanation.words


# -- as it is typed -------------------------------------------------------------------------------


def test_the_command_explains_beside_a_running_server(home: Any) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 2}
    (home.folder / "asked.json").write_text(json.dumps(request))
    request["messages"][0]["content"] = ASKED.replace("fox", "cat")  # type: ignore[index]
    (home.folder / "other.json").write_text(json.dumps(request))
    with home.serving() as served:
        url = f"{served.url}/v1/chat/completions"
        headers = {"content-type": "application/json"}
        body = (home.folder / "asked.json").read_bytes()
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
            assert answer.status == 200
        done = home.run("cache", "explain", "-", "other.json", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["why"] == "differs"
    assert told["differs"]["before"].endswith("The quick brown ")
    assert told["differs"]["asked"].startswith("cat")
    assert told["differs"]["held"].startswith("fox")


def test_without_a_folder_it_says_where_it_looked(tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text('{"prompt": "hi"}')
    done = CliRunner().invoke(
        app, ["cache", "explain", "-", str(tmp_path / "asked.json"), "--path", str(tmp_path / "gone")], obj={}
    )
    assert isinstance(done.exception, ConfigError)
    assert str(tmp_path / "gone") in str(done.exception)


def test_which_of_several_folders_must_be_told(tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text('{"prompt": "hi"}')
    pools = [f'[[{kind}]]\nstore = {{ use = "ssd", path = "{tmp_path / kind}" }}\n' for kind in ("prefill", "decode")]
    (tmp_path / "two.toml").write_text("".join(pools))
    (tmp_path / "prefill").mkdir()
    options = [str(tmp_path / "asked.json"), "--config", str(tmp_path / "two.toml")]
    done = CliRunner().invoke(app, ["cache", "explain", "-", *options], obj={})
    assert isinstance(done.exception, ConfigError)
    assert "several folders" in str(done.exception)


def test_a_request_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text('{"messages": "hi"}')
    done = CliRunner().invoke(app, ["cache", "explain", "-", str(tmp_path / "asked.json")], obj={})
    assert isinstance(done.exception, RequestError)
    assert done.exception.param == "messages"
