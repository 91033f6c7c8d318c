"""Receipts are read as they were written, and whatever is wrong with one is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from deepinfra.engine.receipts import (
    MAX_NBYTES,
    Answered,
    Asked,
    Drawn,
    ExecutorFacts,
    Receipt,
    decoded,
    receipt_in,
    receipt_json,
    receipt_of,
)
from deepinfra.engine.receipts.record import digest_of
from deepinfra.errors import ReceiptError

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2, 3, 4)

SAMPLE = Receipt(
    version=1,
    model="m",
    recipe="r",
    tokenizer="t",
    executors=(ExecutorFacts(weights="w", kv_dtype="bfloat16", numerics="ordinary", machine="x86_64"),),
    configuration="c",
    invariant=True,
    requests=(
        Asked(
            prompt=PROMPT,
            seed="18446744073709551615",
            max_tokens=4,
            sampling=Drawn(temperature=0.5, logit_bias=((7, -1.5),)),
            answers=(Answered(tokens=(5, 6, 7), finish="stop", stop="\u2028\U0001f642"),),
            stop=("\u2028\U0001f642",),
            stop_ids=(0,),
        ),
    ),
)


def sealed(receipt: Receipt) -> Receipt:
    return msgspec.structs.replace(receipt, digest=digest_of(receipt))


def test_the_format_stays_what_it_is() -> None:
    """A change of this digest makes every receipt out there an altered one: it needs another version."""
    assert digest_of(SAMPLE) == "f83c721ce2760c9eda581b206da39bcf54f41a1e474a7280317da567d76e4a07"


def test_a_receipt_survives_programs_that_write_json_otherwise() -> None:
    """JavaScript's `1`, other orders of keys, escapes, and defaults that were filled in."""
    told = json.loads(json.dumps(receipt_json(sealed(SAMPLE))), parse_float=lambda text: float(text))
    told["requests"][0]["sampling"] |= {"top_p": 1, "temperature": 0.5, "min_p": 0}
    told["requests"][0] |= {"approximate": False, "constraint": None}
    shuffled = dict(reversed(told.items()))
    for ascii_only in (True, False):
        assert receipt_of(decoded(json.dumps(shuffled, indent=1, ensure_ascii=ascii_only).encode())) == sealed(SAMPLE)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return [path]
    return [leaf for key, each in items for leaf in _leaves(each, (*path, key))]


LEAVES = _leaves(receipt_json(sealed(SAMPLE)))


@hypothesis.settings(
    suppress_health_check=[HealthCheck.too_slow]
)  # the first draw builds tables, slowly on a busy machine
@given(st.sampled_from(LEAVES), st.data())
def test_an_altered_receipt_is_noticed_whatever_was_altered(path: tuple[Any, ...], data: st.DataObject) -> None:
    told: Any = receipt_json(sealed(SAMPLE))
    holder = told
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    match old:
        case bool():
            new: Any = not old
        case int():
            new = data.draw(st.integers(0, 2**31 - 1).filter(lambda value: value != old))
        case float():
            new = data.draw(st.floats(0, 1).filter(lambda value: value != old))
        case _:
            new = data.draw(st.text(max_size=70).filter(lambda value: value != old))
    if data.draw(st.booleans()):
        holder[path[-1]] = new
    else:
        del holder[path[-1]]
    with pytest.raises(ReceiptError):
        receipt_of(told)


def changed(change: Callable[[Any], object]) -> Any:
    told: Any = receipt_json(sealed(SAMPLE))
    change(told)
    return told


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda told: told.update(version=2), "'version' is 2; this release reads version 1"),
        (lambda told: told.update(version=True), "'version'"),
        (lambda told: told.update(version=10**5000), "'version'"),
        (lambda told: told.pop("version"), "'version'"),
        (lambda told: told.pop("model"), "model"),
        (lambda told: told.update(more=1), "unknown field `more`"),
        (lambda told: told.update(model="x" * 5000), "'model'"),
        (lambda told: told.update(executors=[]), "'executors'"),
        (lambda told: told.update(executors=[[]]), r"'executors\[0\]'"),
        (lambda told: told.update(invariant=1), "'invariant'"),
        (lambda told: told["requests"][0].update(seed=5), r"'requests\[0\].seed'"),
        (lambda told: told["requests"][0].update(seed="9" * 20), r"'requests\[0\].seed' is 2\^64 or more"),
        (lambda told: told["requests"][0].update(seed="-1"), r"'requests\[0\].seed'"),
        (lambda told: told["requests"][0].update(seed="12\n"), r"'requests\[0\].seed'"),
        (lambda told: told["requests"][0].update(prompt=[]), r"'requests\[0\].prompt'"),
        (lambda told: told["requests"][0]["prompt"].append(-1), r"'requests\[0\].prompt\[10\]'"),
        (lambda told: told["requests"][0]["prompt"].append(2**40), r"'requests\[0\].prompt\[10\]'"),
        (lambda told: told["requests"][0]["prompt"].append(1.5), r"'requests\[0\].prompt\[10\]'"),
        (lambda told: told["requests"][0]["prompt"].append([[[]]]), r"'requests\[0\].prompt\[10\]'"),
        (lambda told: told["requests"][0].update(max_tokens=2), r"'requests\[0\].answers\[0\].tokens' are 3"),
        (lambda told: told["requests"][0].update(max_tokens=0), r"'requests\[0\].max_tokens'"),
        (lambda told: told["requests"][0].update(answers=[]), r"'requests\[0\].answers'"),
        (lambda told: told["requests"][0]["answers"][0].update(finish="why"), r"'requests\[0\].answers\[0\].finish'"),
        (lambda told: told["requests"][0]["sampling"].update(temperature=-1), r"sampling.temperature'"),
        (lambda told: told["requests"][0]["sampling"].update(temperature=float("nan")), r"sampling.temperature'"),
        (lambda told: told["requests"][0]["sampling"].update(top_p=float("inf")), r"sampling.top_p'"),
        (lambda told: told["requests"][0]["sampling"].update(top_k="a"), r"sampling.top_k'"),
        (lambda told: told["requests"][0].update(constraint={"kind": "python"}), r"'requests\[0\].constraint.kind'"),
        (lambda told: told["requests"][0].update(stop="abc"), r"'requests\[0\].stop'"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[Any], object], named: str) -> None:
    with pytest.raises(ReceiptError, match=named):
        receipt_of(changed(change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"version": 1, "requests":' + b'{"a":' * 50_000,
        b'{"version": NaN}',
        b'{"version": 1e999}',
        b'{"version": 1, "model": "\\ud800"}',
        b'{"version": 1',
        b"1 2",
    ],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(ReceiptError, match="JSON"):
        decoded(data)


def test_more_than_any_receipt_is_not_read() -> None:
    with pytest.raises(ReceiptError, match="bytes is not read"):
        decoded(b" " * (MAX_NBYTES + 1))


@pytest.mark.parametrize("value", [None, 1, "a", [], [{}], True])
def test_a_receipt_is_an_object(value: Any) -> None:
    with pytest.raises(ReceiptError, match="object"):
        receipt_of(value)


def test_a_receipt_is_found_where_this_server_writes_it_and_nowhere_else() -> None:
    told = receipt_json(sealed(SAMPLE))
    for found in (
        told,
        {"deepinfra": {"receipt": told, "seed": 1}},
        {"receipt": told},
        {"type": "response.completed", "response": {"deepinfra": {"receipt": told}}},
        {"time": 1, "body": {"deepinfra": {"receipt": told}}},
        {"response": {"status": 200, "body": {"deepinfra": {"receipt": told}}}},
    ):
        assert receipt_in(found) is told
    calls = [{"type": "tool_use", "input": {"deepinfra": {"receipt": told}}}]
    nowhere: tuple[Any, ...] = (
        {"content": calls},
        {"deepinfra": {}},
        {"deepinfra": 1},
        [told],
        "receipt",
        {"body": [told]},
    )
    assert all(receipt_in(each) is None for each in nowhere)


def test_log_probabilities_are_told_apart_by_their_last_bit() -> None:
    from deepinfra.core.events import TokenLogprobs, TopLogprob
    from deepinfra.engine.receipts.digest import LogprobDigest

    def digest(logprob: float, top: float = -2.0) -> str:
        digest = LogprobDigest()
        digest.add([TokenLogprobs(1, b"a", logprob, (TopLogprob(2, b"b", top),))])
        return digest.hex(1)

    (bits,) = struct.unpack("<q", struct.pack("<d", -0.5))
    (other,) = struct.unpack("<d", struct.pack("<q", bits + 1))
    assert digest(-0.5) == digest(-0.5)
    assert len({digest(-0.5), digest(other), digest(-0.5, other), digest(float("-inf"))}) == 4
