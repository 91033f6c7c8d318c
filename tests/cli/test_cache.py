"""The cache's tools on folders that a store wrote: what they count, find, repair, carry and forget."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner

from deepinfra.cli import app
from deepinfra.core.kv import KVRecord, NamespaceFilter, Retention
from deepinfra.errors import ConfigError
from deepinfra.interfaces.given import InlineOffload
from deepinfra.kvstores import SsdStore
from deepinfra.kvstores.ssd.checking import check_file
from deepinfra.testing.clock import ManualClock
from deepinfra.testing.kvrecords import chain, content, keys_of, load

HOUR_S = 3600.0
AGENT = Retention(traffic="agent")
OF_A = chain(*range(20), tenant="a", nbytes=500)
OF_B = [
    *chain(*range(12), tenant="b", nbytes=2000, retention=AGENT),
    *chain(*range(4), tenant="b", model="other", kind="snapshot", nbytes=50),
]


def store_at(path: Path, *, age_s: float = 0.0, **options: Any) -> SsdStore:
    """A store whose clock is behind by `age_s`."""
    from deepinfra.interfaces.given import SystemClock

    store = SsdStore(path, **{"min_free_nbytes": 0, "capacity_nbytes": 1 << 24, **options})
    store.give(ManualClock(wall=SystemClock().wall() - age_s), InlineOffload())
    return store


def save(path: Path, *batches: Sequence[KVRecord], age_s: float = 0.0) -> None:
    async def run() -> None:
        async with store_at(path, age_s=age_s) as store:
            for batch in batches:
                await store.save(batch)

    anyio.run(run)


def held(path: Path, records: Sequence[KVRecord]) -> list[bytes]:
    """What a store finds of a chain."""

    async def run() -> list[bytes]:
        async with store_at(path) as store:
            return await load(store, (await store.match(keys_of(records))).refs)

    return anyio.run(run)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kv"
    save(path, OF_A, OF_B)
    return path


def run(*arguments: str, typed: str = "") -> Any:
    return CliRunner().invoke(app, ["cache", *arguments], input=typed, obj={})


def document(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


# -- stats and du ---------------------------------------------------------------------------------


def test_stats_count_what_the_store_counts(folder: Path) -> None:
    told = document("stats", "--path", str(folder))

    async def stats() -> tuple[int, int]:
        async with store_at(folder) as store:
            return store.stats().records, store.stats().processes

    assert (told["records"], told["processes"] + 1) == anyio.run(stats)
    assert told["live_nbytes"] > sum(record.ref.nbytes for record in (*OF_A, *OF_B))
    assert told["disk_nbytes"] >= sum(file.stat().st_size for file in folder.glob("*.kvseg"))
    assert (told["sealed"], told["open"], told["tenants"], told["dead_nbytes"]) == (2, 0, 2, 0)
    assert {group["class"]: group["records"] for group in told["groups"]} == {"agent": 6, "default": 12}
    assert 0 <= told["newest_s"] <= told["oldest_s"] < HOUR_S


def test_stats_see_a_running_process_and_its_open_file(folder: Path) -> None:
    async def beside() -> Any:
        async with store_at(folder) as store:
            await store.save(chain(1, 2, 3, 4, tenant="c"))
            return document("stats", "--path", str(folder))

    told = anyio.run(beside)
    assert (told["processes"], told["open"], told["records"]) == (1, 1, 20)


def test_stats_count_expired_records_as_dead(tmp_path: Path) -> None:
    save(tmp_path, OF_A, age_s=25 * HOUR_S)
    told = document("stats", "--path", str(tmp_path))
    assert told["records"] == 0
    assert told["dead_nbytes"] > sum(record.ref.nbytes for record in OF_A)


def test_du_groups_by_what_is_asked(folder: Path) -> None:
    told = document("du", "--path", str(folder), "--by", "tenant,model,class,kind,age")
    cells = {tuple(group[key] for key in told["by"]): group["records"] for group in told["groups"]}
    assert cells == {
        ("a", "m", "default", "block", "under 1 h"): 10,
        ("b", "m", "agent", "block", "under 1 h"): 6,
        ("b", "other", "default", "snapshot", "under 1 h"): 2,
    }
    assert told["total"]["nbytes"] == sum(group["nbytes"] for group in told["groups"])
    assert [group["nbytes"] for group in told["groups"]] == sorted(
        (group["nbytes"] for group in told["groups"]), reverse=True
    )


def test_du_counts_a_renewed_record_once(tmp_path: Path) -> None:
    save(tmp_path, OF_A, age_s=20 * HOUR_S)
    save(tmp_path, OF_A)
    assert document("du", "--path", str(tmp_path))["total"]["records"] == len(OF_A)


def test_names_that_others_chose_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    save(tmp_path, chain(*range(4), tenant="a\x1b[2J\u202eb\x9b"))
    result = CliRunner().invoke(app, ["cache", "du", "--path", str(tmp_path)], color=True, obj={})
    assert result.exit_code == 0
    assert "a\\x1b[2J\\u202eb\\x9b" in result.output


def test_a_path_in_nobodys_home_is_refused() -> None:
    result = run("stats", "--path", "~nobody-of-this-name/kv")
    assert isinstance(result.exception, ConfigError)
    assert "no user's home" in str(result.exception)


def test_du_refuses_an_unknown_key(folder: Path) -> None:
    assert run("du", "--path", str(folder), "--by", "colour").exit_code == 2


def test_tables_are_for_people(folder: Path) -> None:
    lines = run("du", "--path", str(folder)).stdout.splitlines()
    assert lines[0].split() == ["tenant", "class", "records", "bytes"]
    assert lines[-1].split()[:2] == ["total", "18"]
    assert "2: 2 sealed, 0 open" in run("stats", "--path", str(folder)).stdout


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert document("stats", "--path", str(tmp_path))["records"] == 0
    assert document("du", "--path", str(tmp_path))["groups"] == []
    assert run("fsck", "--path", str(tmp_path)).exit_code == 0


# -- which folder ---------------------------------------------------------------------------------


def test_the_folder_is_the_configured_one(folder: Path, tmp_path: Path) -> None:
    settings = f'use = "ssd"\npath = "{folder}"\ncapacity_nbytes = 4_000_000\n'
    (tmp_path / "deepinfra.toml").write_text(f"[pool.store]\n{settings}")
    told = document("stats")
    assert (told["path"], told["capacity_nbytes"]) == (str(folder), 4_000_000)


def test_a_store_inside_another_is_found(folder: Path, tmp_path: Path) -> None:
    tiers = f'[[pool.store.tiers]]\nuse = "memory"\n[[pool.store.tiers]]\nuse = "ssd"\npath = "{folder}"\n'
    (tmp_path / "deepinfra.toml").write_text(f'[pool.store]\nuse = "tiered"\n{tiers}')
    assert document("stats")["records"] == 18


def test_a_folder_that_pools_share_is_one_folder(folder: Path, tmp_path: Path) -> None:
    pools = [f'[[{kind}]]\nstore = {{ use = "ssd", path = "{folder}" }}\n' for kind in ("prefill", "decode")]
    (tmp_path / "deepinfra.toml").write_text("".join(pools))
    assert document("stats")["records"] == 18


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('[pool.store]\nuse = "memory"\n', "no KV on a disk"),
        ('[pool.store]\npath = "gone"\nuse = "ssd"\n', "no folder"),
    ],
)
def test_without_a_folder_it_says_where_it_looked(folder: Path, tmp_path: Path, settings: str, words: str) -> None:
    (tmp_path / "deepinfra.toml").write_text(settings)
    done = run("stats")
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert "--path" in str(done.exception)


# -- fsck -----------------------------------------------------------------------------------------


def flip(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0xFF
    path.write_bytes(data)


def file_of(folder: Path, traffic: str) -> Path:
    (file,) = folder.glob(f"{traffic}-*.kvseg")
    return file


def damages(folder: Path, *options: str) -> list[tuple[str, int, str]]:
    done = run("fsck", "--path", str(folder), "--json", *options)
    found = [(each["file"], each["offset"], each["what"]) for each in json.loads(done.stdout)["damages"]]
    assert done.exit_code == (1 if found else 0)
    return found


def test_a_whole_folder_is_found_whole(folder: Path) -> None:
    assert damages(folder) == []
    assert "18 whole records in 2 files, 0 damages" in run("fsck", "--path", str(folder)).stdout


def test_damage_is_told_by_file_and_offset(folder: Path) -> None:
    file = file_of(folder, "agent")
    data = file.read_bytes()
    second = data.index(data[:4], 1)  # records begin alike
    flip(file, 10, second + 1900)
    assert damages(folder) == [(file.name, 0, "header"), (file.name, second, "payload")]


def test_a_repair_drops_what_is_damaged_and_nothing_else(folder: Path) -> None:
    file = file_of(folder, "agent")
    flip(file, 10, 9000)
    used = file.stat().st_mtime_ns
    assert len(damages(folder, "--repair")) == 2
    assert file.stat().st_mtime_ns == used, "by its time of change stores know which file to remove first"
    assert damages(folder) == []
    assert held(folder, OF_A) == [content(record.ref) for record in OF_A]
    assert document("du", "--path", str(folder))["total"]["records"] == 16
    save(folder, OF_B)
    assert held(folder, OF_B[:6]) == [content(record.ref) for record in OF_B[:6]]


@pytest.mark.parametrize("cut", [1, 40, 700], ids=lambda cut: f"{cut} bytes")
def test_a_cut_file_loses_what_was_cut(folder: Path, cut: int) -> None:
    file = file_of(folder, "default")
    os.truncate(file, file.stat().st_size - cut)
    assert [what for _, _, what in damages(folder, "--repair")] == ["tail"]
    assert damages(folder) == []
    assert held(folder, OF_A) == [content(record.ref) for record in OF_A]


def test_a_file_of_rubbish_goes(folder: Path) -> None:
    file = file_of(folder, "agent")
    file.write_bytes(os.urandom(5000))
    assert damages(folder, "--repair") == [(file.name, 0, "tail")]
    assert not file.exists()


def test_a_flipped_byte_anywhere_is_found(folder: Path) -> None:
    file = file_of(folder, "default")
    whole = file.read_bytes()
    for place in range(0, len(whole), 61):
        flip(file, place)
        assert check_file(folder, file.name, living=False).damages, f"byte {place} of {len(whole)}"
        file.write_bytes(whole)


def test_a_file_that_a_process_appends_to_is_left_alone(folder: Path) -> None:
    async def beside() -> Any:
        async with store_at(folder) as store:
            records = chain(*range(8), tenant="c")
            await store.save(records)
            name = next(file for file in folder.glob("default-*.kvseg") if file != file_of_a)
            flip(name, 3100)
            flip(file_of_a, 10)
            done = await anyio.to_thread.run_sync(run, "fsck", "--path", str(folder), "--repair", "--json")
            return name.name, json.loads(done.stdout), await load(store, (await store.match(keys_of(OF_B[:6]))).refs)

    file_of_a = file_of(folder, "default")
    name, told, beside_it = anyio.run(beside)
    assert told["repaired"] == [file_of_a.name]
    assert told["skipped"] == [name]
    assert beside_it == [content(record.ref) for record in OF_B[:6]]


# -- export, import, forget -----------------------------------------------------------------------


def test_what_is_exported_can_be_imported_elsewhere(folder: Path, tmp_path: Path) -> None:
    assert run("export", "out.dikv", "--path", str(folder)).exit_code == 0
    assert (tmp_path / "out.dikv").stat().st_mode & 0o777 == 0o600
    done = run("import", "out.dikv", "--path", str(tmp_path / "new"))
    assert "18 records saved" in done.stdout
    for records in (OF_A, OF_B[:6]):
        assert held(tmp_path / "new", records) == [content(record.ref) for record in records]
    by = "tenant,model,class,kind"
    copies = [document("du", "--path", str(path), "--by", by)["groups"] for path in (folder, tmp_path / "new")]
    assert copies[0] == copies[1]


def test_records_expire_when_they_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "kv", OF_A, age_s=22 * HOUR_S)
    run("export", "out.dikv", "--path", "kv")
    run("import", "out.dikv", "--path", "new")
    before, after = (document("stats", "--path", path)["groups"] for path in ("kv", "new"))
    assert [group["expires"] for group in before] == [group["expires"] for group in after]


@pytest.mark.parametrize(
    ("options", "count"),
    [(("--tenant", "a"), 10), (("--model", "other"), 2), (("--tenant", "b", "--class", "agent"), 6)],
)
def test_an_export_can_be_of_some(folder: Path, options: tuple[str, ...], count: int) -> None:
    assert f"{count} records" in run("export", "out.dikv", "--path", str(folder), *options).stdout


def test_importing_twice_changes_nothing(folder: Path) -> None:
    run("export", "out.dikv", "--path", str(folder))
    assert "0 records saved" in run("import", "out.dikv", "--path", str(folder)).stdout
    assert document("stats", "--path", str(folder))["records"] == 18


def test_damaged_records_are_not_exported(folder: Path) -> None:
    flip(file_of(folder, "agent"), 10)
    assert "17 records" in run("export", "out.dikv", "--path", str(folder)).stdout


def test_an_import_keeps_the_configured_cap(folder: Path, tmp_path: Path) -> None:
    run("export", "out.dikv", "--path", str(folder))
    (tmp_path / "deepinfra.toml").write_text('[pool.store]\nuse = "ssd"\npath = "small"\ncapacity_nbytes = 16_000\n')
    assert run("import", "out.dikv").exit_code == 0
    assert document("stats")["disk_nbytes"] <= 16_000


@pytest.mark.parametrize("told", [True, False], ids=["path", "config"])
def test_an_import_removes_nothing_of_a_folder_that_is_larger_than_the_cap(
    folder: Path, tmp_path: Path, told: bool
) -> None:
    run("export", "out.dikv", "--path", str(folder), "--tenant", "b")
    full = tmp_path / "full"
    save(full, *(chain(*range(start, start + 20), tenant="c", nbytes=4_000) for start in range(0, 200, 20)))
    before = document("stats", "--path", str(full))
    (tmp_path / "deepinfra.toml").write_text('[pool.store]\nuse = "ssd"\npath = "full"\ncapacity_nbytes = 100_000\n')
    done = run("import", "out.dikv", *(["--path", str(full)] if told else []))
    assert done.exit_code == 0
    assert "0 records saved" in done.stdout
    assert "left out" in done.stderr
    assert document("stats", "--path", str(full))["records"] == before["records"] == 100


@pytest.mark.parametrize("damage", ["cut", "flip", "rubbish"])
def test_a_hostile_file_is_an_error_and_costs_nothing(folder: Path, tmp_path: Path, damage: str) -> None:
    run("export", "out.dikv", "--path", str(folder), "--tenant", "b")
    file = tmp_path / "out.dikv"
    data = bytearray(file.read_bytes())
    match damage:
        case "cut":
            del data[-100:]
        case "flip":
            data[len(data) // 2] ^= 1
        case _:
            data[:] = os.urandom(1000)
    file.write_bytes(data)
    done = run("import", "out.dikv", "--path", str(folder))
    assert isinstance(done.exception, ConfigError)
    assert "out.dikv" in str(done.exception)
    assert held(folder, OF_A) == [content(record.ref) for record in OF_A]
    assert damages(folder) == []


def test_a_failed_export_leaves_the_old_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.dikv").write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run("export", "out.dikv", "--path", str(folder)).exit_code == 1
    assert (tmp_path / "out.dikv").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "out.dikv"]


def test_forget_is_for_whom_it_was_asked(folder: Path) -> None:
    done = run("forget", "--tenant", "b", "--model", "other", "--path", str(folder), "--yes")
    assert "forgot 2 records" in done.stdout
    assert document("du", "--path", str(folder), "--by", "tenant,model")["total"]["records"] == 16


def test_forget_works_beside_a_running_server(folder: Path) -> None:
    async def beside() -> list[int]:
        async with store_at(folder) as store:
            counts = [len((await store.match(keys_of(OF_B[:6]))).refs)]
            await anyio.to_thread.run_sync(run, "forget", "--tenant", "b", "--path", str(folder), "--yes")
            await store.forget(NamespaceFilter(tenant="nobody"))  # hears what was forgotten
            return counts + [len((await store.match(keys_of(records))).refs) for records in (OF_B[:6], OF_A)]

    assert anyio.run(beside) == [6, 0, 10]


def test_forget_asks_first(folder: Path) -> None:
    done = run("forget", "--tenant", "a", "--path", str(folder), typed="n\n")
    assert done.exit_code == 1
    assert "10 records of tenant 'a'" in done.stdout
    assert document("stats", "--path", str(folder))["records"] == 18
    assert "forgot 10" in run("forget", "--tenant", "a", "--path", str(folder), typed="y\n").stdout


def test_forget_everything_must_be_said(folder: Path) -> None:
    assert run("forget", "--path", str(folder), "--yes").exit_code == 2


def salted(folder: Path) -> tuple[list[KVRecord], list[KVRecord]]:
    """What two customers of a tenant left there."""
    one, other = (chain(*range(40, 48), tenant="a", salt=salt, nbytes=500) for salt in ("one", "other"))
    save(folder, one, other)
    return one, other


def test_forget_one_namespace_leaves_the_rest_of_its_tenant(folder: Path) -> None:
    one, other = salted(folder)
    groups = document("du", "--path", str(folder), "--by", "tenant,namespace")["groups"]
    shown = one[0].namespace.hex()[:12]
    assert {"tenant": "a", "namespace": shown} in [{k: g[k] for k in ("tenant", "namespace")} for g in groups]
    done = run("forget", "--namespace", shown.upper(), "--path", str(folder), "--yes")
    assert f"4 records of namespace '{one[0].namespace.hex()}'" in done.stdout
    assert "forgot 4 records" in done.stdout
    assert [len(held(folder, records)) for records in (one, other, OF_A)] == [0, 4, 10]


def test_forget_a_namespace_of_another_tenant_forgets_nothing(folder: Path) -> None:
    one, _ = salted(folder)
    done = run("forget", "--tenant", "b", "--namespace", one[0].namespace.hex(), "--path", str(folder), "--yes")
    assert "forgot 0 records" in done.stdout
    assert len(held(folder, one)) == 4


@pytest.mark.parametrize("digits", ["0451139", "0451139x", "0" * 65, "sausage!"])
def test_a_namespace_is_named_by_eight_hex_digits_or_more(folder: Path, digits: str) -> None:
    done = run("forget", "--namespace", digits, "--path", str(folder), "--yes")
    assert done.exit_code == 2
    assert "8 to 64 hex digits" in " ".join(done.output.replace("│", " ").split())


def test_a_namespace_that_is_not_there_is_no_success(folder: Path) -> None:
    done = run("forget", "--namespace", "00000000", "--path", str(folder), "--yes")
    assert done.exit_code == 1
    assert document("stats", "--path", str(folder))["records"] == 18


def test_digits_with_which_several_namespaces_begin_are_refused(folder: Path) -> None:
    twins = [replace(OF_A[0], namespace=bytes.fromhex("0451139525e8") + bytes([n]) * 26) for n in (1, 2)]
    save(folder, *([replace(twin, ref=chain(n, n)[0].ref, data=chain(n, n)[0].data)] for n, twin in enumerate(twins)))
    done = run("forget", "--namespace", "0451139525e8", "--path", str(folder), "--yes")
    assert done.exit_code == 2
    assert "several" in done.output
    assert "0451139525e80202" in done.output
    assert "forgot 1 records" in run("forget", "--namespace", "0451139525e802", "--path", str(folder), "--yes").stdout


def test_a_folder_is_found_without_the_files_of_public_prefixes(folder: Path) -> None:
    config = folder.parent / "elsewhere.toml"
    config.write_text(
        f'model = "smollm2"\npublic_prefixes = ["missing.txt"]\n[pool.store]\nuse = "ssd"\npath = "{folder}"\n'
    )
    assert document("stats", "--config", str(config))["records"] == 18


def test_hours_are_said_to_be_utc(folder: Path) -> None:
    assert "expires before (UTC)" in run("stats", "--path", str(folder)).stdout


def test_explain_says_that_it_takes_one_request(folder: Path) -> None:
    lines = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    (folder.parent / "requests.jsonl").write_bytes(lines)
    done = run("explain", "toy", "requests.jsonl", "--path", str(folder))
    assert done.exit_code == 1
    assert "takes one request" in str(done.exception)
