"""Traces from files."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from deepinfra.bench.simulate.traces import Arrival, read_workload
from deepinfra.errors import ConfigError

TRACES = Path(__file__).parents[2] / "data" / "traces"
LINE = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,0\n"
)


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_lines_of_json_are_requests_by_time_from_0(tmp_path: Path) -> None:
    later = LINE | {"timestamp": 4500, "hash_ids": [1, 3]}
    found = read_workload(written(tmp_path, f"{json.dumps(later)}\n\n{json.dumps(LINE)}\n"))
    assert found == [Arrival(0.0, 700, 5, (1, 2)), Arrival(1.5, 700, 5, (1, 3))]


def test_a_table_is_read_whatever_its_name_and_packed_too(tmp_path: Path) -> None:
    plain = read_workload(written(tmp_path, AZURE, "trace.txt"))
    assert plain == [Arrival(0.0, 4808, 10), Arrival(0.052, 3180, 1)]
    packed = tmp_path / "trace"
    packed.write_bytes(lzma.compress(AZURE.encode()))
    assert read_workload(packed) == plain


def test_a_public_trace_is_read_whole() -> None:
    found = read_workload(TRACES / "mooncake_conversation.jsonl.xz")
    assert (len(found), sum(arrival.output for arrival in found)) == (12_031, 4_122_048)
    assert (found[0].at_s, found[-1].at_s) == (0.0, 3536.999)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the file is empty"),
        ("hello\n", "line 1: neither a JSON object nor a head with TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\n", "line 1: neither a JSON object nor a head with GeneratedTokens"),
        (AZURE + "2023-11-16 18:17:04.0319600,many,8\n", "line 4: invalid literal"),
        (AZURE + "2023-11-16 18:17:04.0319600\n", "line 4: "),
        (AZURE + "2023-11-16 18:17:04.0319600,0,8\n", "line 4: a request at .* of 0 tokens"),
        (json.dumps(LINE) + "\n{\n", "line 2: "),
        (json.dumps(LINE) + "\n[]\n", "line 2: "),
        (json.dumps({**LINE, "timestamp": "NaN"}), "line 1: a request at nan s"),
        ('{"timestamp": 1, "input_length": 2, "hash_ids": [1]}\n', "line 1: no field 'output_length'"),
        (json.dumps(LINE | {"hash_ids": [1]}), "line 1: hash_ids: 1 blocks of 512 do not hold 700 tokens"),
    ],
)
def test_what_is_wrong_is_told_by_its_line(tmp_path: Path, text: str, why: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=f"^{path}(, |: ){why}"):
        read_workload(path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for data in (b"\xff\xfe\x00", lzma.compress(b"{}")[:-9]):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="neither JSON lines nor CSV"):
            read_workload(path)
