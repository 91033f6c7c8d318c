from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from deepinfra.bench.simulate.plan.fleets import CONVERSATION
from deepinfra.bench.simulate.plan.traffic import summarised
from deepinfra.errors import ConfigError

TRACE = Path(__file__).parents[3] / "data" / "traces" / "mooncake_conversation.jsonl.xz"


def test_the_ready_made_shape_is_that_of_the_trace() -> None:
    with lzma.open(TRACE, "rt") as file:
        rows = [json.loads(line) for line in file]
    lengths = [(row["input_length"], row["output_length"]) for row in rows]
    found = summarised(lengths, source="trace", tokens_day=1e9, hit_rate=0.0)
    for name in ("prompt", "output", "position", "context"):
        assert getattr(found, name) == pytest.approx(getattr(CONVERSATION, name), rel=1e-5)


def test_long_prompts_weigh_as_much_as_they_have_tokens() -> None:
    found = summarised([(100, 10), (300, 10)], source="two", tokens_day=820.0, hit_rate=0.5)
    assert (found.prompt, found.output, found.requests_day, found.uncached) == (200, 10, 820 / 210, 100)
    assert found.position == pytest.approx((100 * 50 + 300 * 150) / 400)
    assert found.context == pytest.approx((105 + 305) / 2)
    assert found.uncached_position == pytest.approx(1.5 * found.position)


@pytest.mark.parametrize("rows", [[], [(0, 5)], [(5, 0)]])
def test_nothing_has_no_shape(rows: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="trace: empty has no prompt or no output tokens"):
        summarised(rows, source="empty", tokens_day=1.0, hit_rate=0.0)
