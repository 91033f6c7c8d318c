"""What operators published about fleets that run: to be compared with, never to predict from.

Only `compare` may import this module; tests hold the rest to it, and change every figure here to see that no
prediction moves.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("PUBLISHED", "Published")


class Published(NamedTuple):
    """One figure: the field of `Plan` that it is to be compared with, its value, and who said so."""

    quantity: str
    value: float
    source: str


_WALK = "DeepSeek's production write-up of October 2026, in a public walk-through of it, {}"
_INDEX = "deepseek-ai/open-infra-index, day 6: {}"

PUBLISHED: dict[str, tuple[Published, ...]] = {
    "deepseek-2026": (
        Published("decode_tokens_s", 14_000.0, _WALK.format("09:55: about 14,000 over all users")),
        Published("user_tokens_s", 200.0, _WALK.format("10:26: a couple of hundred")),
        Published("prefill_per_decode", 1.0, _WALK.format("07:20: about one")),
        Published("revenue_usd_hour", 38.0, _WALK.format("10:26: about 38, off-peak")),
        Published("kv_7_days_nbytes", 100e15, _WALK.format("05:14: about 100 PB, of 3 days of agents and 7 of chats")),
    ),
    "deepseek-2025": (
        Published("decode_tokens_s", 14_800.0 / 8, _INDEX.format("14.8k per node of 8")),
        Published("user_tokens_s", 21.0, _INDEX.format("20 to 22")),
        Published("input_tokens_s", 73_700.0 / 8, _INDEX.format("73.7k per node of 8, cached ones among them")),
        Published(
            "prefill_per_decode",
            (608e9 / 73_700) / (168e9 / 14_800),
            _INDEX.format("608 G tokens at 73.7k per node, 168 G at 14.8k"),
        ),
        Published("devices", 226.75 * 8, _INDEX.format("226.75 nodes in the mean")),
        Published("revenue_usd_hour", 562_027 / (226.75 * 8 * 24), _INDEX.format("562,027 USD a day, at R1's prices")),
        Published("usd_million", 87_072 / 168e3, _INDEX.format("87,072 USD a day")),
    ),
}
"""By the fleet's name."""
