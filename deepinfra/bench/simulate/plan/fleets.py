"""Two fleets that run and of which enough is public to plan them: DeepSeek's of 2026 and of 2025.

What is taken from their descriptions is design and traffic: how much, how long, how often cached, how experts are
spread. Speeds, ratios and numbers of devices are not; those are in `published`, to be compared.
"""

from __future__ import annotations

from deepinfra.bench.simulate.plan.devices import DEVICES
from deepinfra.bench.simulate.plan.fleet import Fleet, Service
from deepinfra.bench.simulate.plan.given import replaced
from deepinfra.bench.simulate.plan.models import MODELS
from deepinfra.bench.simulate.plan.roofline import Layout
from deepinfra.bench.simulate.plan.traffic import Traffic
from deepinfra.errors import ConfigError

__all__ = ("CONVERSATION", "DEFAULT", "FLEETS", "fleet_named")

DEFAULT = "deepseek-2026"
"""The fleet that is planned if no other is named."""

_WRITE_UP = "DeepSeek's production write-up of October 2026, in a public walk-through of it"
_INDEX = "deepseek-ai/open-infra-index, day 6 (February 2025)"

CONVERSATION = Traffic(
    source="Mooncake's conversation trace (FAST'25), all of its 12,031 requests",
    tokens_day=155e12,
    prompt=12_035.06,
    output=342.62,
    hit_rate=0.96,
    position=16_389.35,
    context=13_125.90,
    sources={"tokens_day": f"{_WRITE_UP}, 00:00", "hit_rate": f"{_WRITE_UP}, 05:14"},
)
"""Mooncake's conversations at the volume and hit rate that DeepSeek tells of its own, of which no lengths are known."""

_OF_2025 = {"peak": 1.0, "busy": 1.0, "hit_usd": 0.14, "miss_usd": 0.55, "output_usd": 2.19}
"""Of the service then: machines were taken in and out with the traffic, so that nothing is kept for its peak."""

FLEETS = {
    DEFAULT: Fleet(
        prefill=DEVICES["b200"],
        decode=DEVICES["gb200"],
        model=MODELS["deepseek-v4.1-flash"],
        traffic=CONVERSATION,
        prefill_layout=Layout(width=8, source=f"{_WRITE_UP}, 06:49: ordinary machines of 8"),
        decode_layout=Layout(width=64, spares=64, source=f"{_WRITE_UP}, 07:51: 64 devices, a spare copy on each"),
    ),
    "deepseek-2025": Fleet(
        prefill=DEVICES["h800"],
        decode=DEVICES["h800"],
        model=MODELS["deepseek-v3"],
        traffic=Traffic(
            source=f"{_INDEX}: 608 G prompt and 168 G output tokens in a day, of requests with a mean context of 4,989",
            tokens_day=776e9,
            prompt=4_384.0,
            output=1_211.0,
            hit_rate=0.563,
            position=2_192.0,
            context=4_989.0,
        ),
        prefill_layout=Layout(width=32, spares=32, source=_INDEX),
        decode_layout=Layout(width=144, spares=32, source=_INDEX),
        service=replaced(Service(), _OF_2025, _INDEX),
    ),
}

"""Those known by name."""


def fleet_named(name: str) -> Fleet:
    """A fleet by its name.

    Raises:
        ConfigError: None has that name.
    """
    try:
        return FLEETS[name]
    except KeyError:
        raise ConfigError(f"fleet: none is named {name!r}; known: {', '.join(FLEETS)}") from None
