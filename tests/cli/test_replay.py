"""`deepinfra replay`: what it reads, what it says, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from deepinfra.cli.recordings import recordings
from deepinfra.core.request import GenerateRequest
from deepinfra.engine import Engine, Pool
from deepinfra.engine.receipts import Receipt, receipt_json
from deepinfra.engine.receipts.record import digest_of
from deepinfra.errors import ReceiptError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.schedulers import Bucketed
from deepinfra.testing.tiny import TinyRecipe


def made(count: int = 1, *, n: int = 2, max_tokens: int = 6, **toy: Any) -> list[Receipt]:
    """Receipts of the engine that `home`'s configuration describes."""
    return anyio.run(_made, count, n, max_tokens, toy)


async def _made(count: int, n: int, max_tokens: int, toy: dict[str, Any]) -> list[Receipt]:
    receipts = []
    async with Engine(TinyRecipe(), Pool(Bucketed(), ToyExecutor(num_blocks=256, **toy)), name="tiny") as engine:
        for seed in range(count):
            request = GenerateRequest(input=(1, 2, 3, 104, 105), n=n, seed=seed, max_tokens=max_tokens, receipt=True)
            async with engine.generate(request) as stream:
                async for _ in stream:
                    pass
            assert stream.receipt is not None
            receipts.append(stream.receipt)
    return receipts


def with_token(receipt: Receipt, at: int) -> Receipt:
    """The same, but for a token of its second answer, and sealed again."""
    asked = receipt.requests[0]
    first, second = asked.answers
    tokens = (*second.tokens[:at], (second.tokens[at] + 1) % 256, *second.tokens[at + 1 :])
    answers = (first, msgspec.structs.replace(second, tokens=tokens))
    changed = msgspec.structs.replace(receipt, requests=(msgspec.structs.replace(asked, answers=answers),), digest="")
    return msgspec.structs.replace(changed, digest=digest_of(changed))


def lines(receipts: Sequence[Receipt]) -> str:
    return "".join(json.dumps({"deepinfra": {"receipt": receipt_json(receipt)}}) + "\n" for receipt in receipts)


# -- the command --------------------------------------------------------------------------------------


def test_all_the_same_exits_0_and_shows_progress(home: Any) -> None:
    (home.folder / "log.jsonl").write_text('{"deepinfra": {"seed": 1}}\n\n' + lines(made(3)))
    done = home.run("replay", "log.jsonl", "--concurrency", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "log.jsonl:3: the same 12 tokens\nlog.jsonl:4: the same 12 tokens\nlog.jsonl:5: the same 12 tokens\n"
        "3 receipts: 3 the same\n"
    )
    assert "replayed: 3 of 3, 3 the same" in done.stderr


def test_a_long_log_is_told_in_its_order_with_a_running_count(home: Any) -> None:
    (first, last), broken = made(2), '{"requests": "x", "pad": "\n' * 500
    (home.folder / "log.jsonl").write_text(lines([first]) + broken + lines([last]))
    done = home.run("replay", "log.jsonl", "--concurrency", "3")
    said = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in said[:-1]] == [f"log.jsonl:{number}" for number in range(1, 503)]
    assert said[-1] == "502 receipts: 2 the same, 500 unreadable"
    assert done.stderr.rstrip().endswith("replayed: 502 of 502, 2 the same")


def test_one_of_something_is_no_plural(home: Any) -> None:
    (home.folder / "one.json").write_text(lines(made(n=1, max_tokens=1)))
    done = home.run("replay", "one.json")
    assert done.stdout == "one.json: the same 1 token\n1 receipt: 1 the same\n"


def test_each_way_not_to_be_the_same_exits_1_and_is_named(home: Any) -> None:
    same, other, altered = made(3)
    (foreign,) = made(seed=9)
    broken = lines([altered]).replace('"finish": "length"', '"finish": "stop"')
    log = lines([same]) + lines([with_token(other, 4)]) + broken + lines([foreign])
    (home.folder / "log.jsonl").write_text(log)
    done = home.run("replay", "-c", "deepinfra.toml", "log.jsonl")
    said = done.stdout.splitlines()
    assert done.returncode == 1
    assert said[0] == "log.jsonl:1: the same 12 tokens"
    assert said[1].startswith("log.jsonl:2: differs at token 4 of answer 1 to prompt 0, behind ")
    assert f"recorded {with_token(other, 4).requests[0].answers[1].tokens[4]} " in said[1]
    assert f"here {other.requests[0].answers[1].tokens[4]} " in said[1]
    assert said[1].endswith("; the same was promised: this is a fault of the server or of the machine")
    assert said[2].startswith("log.jsonl:3: cannot be read: 'digest' is not that of the receipt")
    assert said[3] == (
        "log.jsonl:4: cannot be compared: weights differs (recorded 'toy-9', here 'toy-0'); "
        "--model or --config choose other weights"
    )
    assert said[4] == "4 receipts: 1 the same, 1 different, 1 not comparable, 1 unreadable"


def test_what_a_file_says_does_nothing_to_the_terminal(home: Any) -> None:
    (receipt,) = made(1)
    hostile = lines([receipt]).replace('"version": 1', '"version": 1, "\\u001b[2Jx": 1')
    (home.folder / "log.jsonl").write_text(hostile)
    done = home.run("replay", "log.jsonl")
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert "cannot be read" in done.stdout


def test_json_tells_every_outcome_once(home: Any) -> None:
    same, other = made(2)
    home.folder.joinpath("log.jsonl").write_text(lines([same, with_token(other, 0)]) + '{"requests": []}\n')
    done = home.run("replay", "log.jsonl", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert told["counts"] == {"same": 1, "differs": 1, "unreadable": 1}
    assert [each["verdict"] for each in told["receipts"]] == ["same", "differs", "unreadable"]
    assert [answer["at"] for answer in told["receipts"][1]["answers"]] == [None, 0]
    assert told["receipts"][1]["promised"] is True
    assert told["receipts"][2]["where"] == "log.jsonl:3"


def test_standard_input_is_read_and_other_weights_are_tried_when_told(home: Any) -> None:
    (receipt,) = made(seed=9)
    done = home.run("replay", "-", "--anyway", typed=json.dumps(receipt_json(receipt), indent=2))
    assert done.returncode == 1
    assert done.stdout.startswith("standard input: differs at token 0")
    assert "although weights differs (recorded 'toy-9', here 'toy-0')" in done.stdout


def test_the_same_under_another_configuration_is_not_told_to_ask_for_a_promise(home: Any) -> None:
    (receipt,) = made()
    other = msgspec.structs.replace(receipt, recipe="0" * 32, digest="")
    sealed = msgspec.structs.replace(other, digest=digest_of(other))
    done = home.run("replay", "-", "--anyway", typed=json.dumps(receipt_json(sealed)))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 receipt: 1 the same")


def test_what_has_no_receipt_is_one_sentence(home: Any) -> None:
    (home.folder / "none.jsonl").write_text('{"choices": []}\n{"choices": []}\n')
    for args, sentence in (
        (("none.jsonl",), "deepinfra: none.jsonl has no receipt\n"),
        (("missing.json",), "deepinfra: missing.json: No such file or directory\n"),
    ):
        done = home.run("replay", *args)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


# -- files --------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recorded"


def test_a_stream_as_curl_recorded_it_has_one(file: Path) -> None:
    (receipt,) = made()
    told = json.dumps({"type": "message_delta", "deepinfra": {"receipt": receipt_json(receipt)}})
    file.write_text(
        ': keep-alive\n\nevent: message_start\ndata: {"type": "message_start"}\n\n'
        f"event: message_delta\r\ndata: {told}\r\n\r\ndata: [DONE]\n\n"
    )
    (found,) = recordings(str(file))
    assert found.where == f"{file}:7"
    assert found.receipt() == receipt


def test_a_whole_answer_over_many_lines_has_one(file: Path) -> None:
    (receipt,) = made()
    file.write_text(json.dumps({"id": "x", "deepinfra": {"receipt": receipt_json(receipt)}}, indent=4))
    assert [found.receipt() for found in recordings(str(file))] == [receipt]


def test_a_file_larger_than_any_receipt_is_read_line_by_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receipts = made(3)
    longest = max(map(len, lines(receipts).splitlines()))
    monkeypatch.setattr("deepinfra.engine.receipts.MAX_NBYTES", longest)
    monkeypatch.setattr("deepinfra.cli.recordings._PIECE_NBYTES", 100)
    file.write_text(lines(receipts))
    assert [found.receipt() for found in recordings(str(file))] == receipts
    file.write_text(lines(receipts) + "{" + '"a",' * longest)
    with pytest.raises(ReceiptError, match="a line of more than"):
        recordings(str(file))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "neither JSON nor lines of JSON|has no receipt"),
        (b"\x00\xff\xfe" * 100, "is neither JSON nor lines of JSON"),
        (b"hello\nworld\n", "is neither JSON nor lines of JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_of_something_else_says_what_is_wrong(file: Path, data: bytes, why: str) -> None:
    file.write_bytes(data)
    with pytest.raises(ReceiptError, match=why):
        recordings(str(file))


@pytest.mark.parametrize("data", [b"{}", b"[1]", b"null", b'{"deepinfra": {"seed": 1}}'])
def test_json_without_a_receipt_says_so_when_it_is_its_turn(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    (found,) = recordings(str(file))
    with pytest.raises(ReceiptError, match="there is no receipt in it"):
        found.receipt()
