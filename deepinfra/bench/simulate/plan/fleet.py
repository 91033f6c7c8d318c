"""From devices, a model and traffic to a fleet: batches, speeds, ratio, devices, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from deepinfra.bench.simulate.plan.devices import Device
from deepinfra.bench.simulate.plan.given import SHARE, ZERO, Given, check, givens
from deepinfra.bench.simulate.plan.roofline import Efficiency, Layout, Roofline
from deepinfra.bench.simulate.plan.shape import ModelShape
from deepinfra.bench.simulate.plan.traffic import Traffic
from deepinfra.core.cost import StepWork
from deepinfra.errors import ConfigError

__all__ = ("DAY_S", "Batch", "Fleet", "Plan", "Service")

DAY_S = 86_400.0
"""Seconds of a day."""

GROWTH = 1.02
"""From one batch that is tried to the next; no finer, since rooflines are no more exact."""

_PLACES = ("prefill", "decode", "model", "traffic", "prefill_layout", "decode_layout", "efficiency", "service")

_SERVICE_SOURCES = {
    "accepted": "mean tokens per step with this draft head, measured by users on 4 DGX Spark (1.88 to 5.92 by text); "
    "others: 2.82 (vLLM issue 56797, GSM8K), 5.6 (Baseten)",
    "chunk": "vLLM's default of max_num_batched_tokens on data-centre devices",
    "busy": "assumed: a prompt then waits for two steps in the mean (M/D/1)",
    "peak": "assumed: day and night",
    "hit_usd": "DeepSeek's API price list, October 2026, off-peak",
    "miss_usd": "DeepSeek's API price list, October 2026, off-peak",
    "output_usd": "DeepSeek's API price list, October 2026, off-peak",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How the fleet is run.

    Attributes:
        accepted: Tokens that a decoding sequence gets per step, if the model drafts.
        chunk: Prompt tokens per prefill step and device (of all devices that share sequences).
        busy: Share of the time in which a prefill device computes, at the peak.
        peak: Traffic at the peak over that in the mean.
        hit_usd: Price of a million cached prompt tokens.
        miss_usd: Price of a million other prompt tokens.
        output_usd: Price of a million output tokens.
        batch: Decoding sequences per device (of all devices that share them); 0 = found, see `user_speed`.
        user_speed: Tokens per second and user to reach with the largest batch that does; 0 = the batch at which
            throughput times speed is highest: beyond it users lose a larger share of speed than the fleet wins.
        source: Of all that have none of their own.
        sources: Of each.
    """

    accepted: float = 3.57
    chunk: int = 8192
    busy: float = field(default=0.8, metadata=SHARE)
    peak: float = 1.25
    hit_usd: float = field(default=0.003, metadata=ZERO)
    miss_usd: float = field(default=0.15, metadata=ZERO)
    output_usd: float = field(default=0.60, metadata=ZERO)
    batch: int = field(default=0, metadata=ZERO)
    user_speed: float = field(default=0.0, metadata=ZERO)
    source: str = "chosen"
    sources: Mapping[str, str] = field(default_factory=lambda: _SERVICE_SOURCES, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Decoding at one batch: sequences, seconds of a step, tokens per second of a user and of a device."""

    sequences: int
    step_s: float
    user_tokens_s: float
    tokens_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a fleet needs and does.

    Attributes:
        decode_tokens_s: Output tokens per second and decode device.
        user_tokens_s: Output tokens per second and user.
        batch: Sequences that a decode device, or a group that shares them, decodes together.
        batch_room: Sequences that would fit.
        decode_step_s: Seconds of their step.
        prefill_tokens_s: Uncached prompt tokens per second and prefill device while it computes.
        input_tokens_s: Prompt tokens per second and prefill device, cached ones among them.
        prefill_step_s: Seconds of a full prefill step.
        prefill_per_decode: Prefill devices per decode device.
        prefill_devices: For the peak of the traffic, in whole groups.
        decode_devices: The same.
        devices: Of both kinds.
        kv_nbytes_day: KV that is new, in a day.
        kv_3_days_nbytes: KV to keep for 3 days.
        kv_7_days_nbytes: KV to keep for 7 days.
        store_bytes_s: Read from the store at the peak.
        handoff_nbytes: From a prefill to a decode device per request.
        network_share: Of a prefill device's network that loading hits and handing off takes, at the peak.
        revenue_usd_hour: Of a device of the fleet, in the mean of the day.
        usd_million: Price of devices per million output tokens; 0 where the price of a device is unknown.
        decode_limit: The part of a decode step that takes longest, and what it waits for.
        prefill_limit: The same of a prefill step.
    """

    decode_tokens_s: float
    user_tokens_s: float
    batch: int
    batch_room: int
    decode_step_s: float
    prefill_tokens_s: float
    input_tokens_s: float
    prefill_step_s: float
    prefill_per_decode: float
    prefill_devices: int
    decode_devices: int
    devices: int
    kv_nbytes_day: float
    kv_3_days_nbytes: float
    kv_7_days_nbytes: float
    store_bytes_s: float
    handoff_nbytes: float
    network_share: float
    revenue_usd_hour: float
    usd_million: float
    decode_limit: str
    prefill_limit: str


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All that a plan is given.

    Attributes:
        prefill: Device that computes prompts.
        decode: Device that decodes.
        model: What is served.
        traffic: What users send.
        prefill_layout: Of the model on prefill devices.
        decode_layout: Of the model on decode devices.
        efficiency: What of the peaks is reached.
        service: How it is run.
    """

    prefill: Device
    decode: Device
    model: ModelShape
    traffic: Traffic
    prefill_layout: Layout
    decode_layout: Layout
    efficiency: Efficiency = Efficiency()
    service: Service = Service()

    def __post_init__(self) -> None:
        """Refuse what is out of its limits."""
        for place in _PLACES:
            check(getattr(self, place), place)

    def givens(self) -> Iterator[Given]:
        """Every figure that the plan is given, with its source."""
        for place in _PLACES:
            yield from givens(getattr(self, place), place)

    @cached_property
    def decode_roofline(self) -> Roofline:
        """Steps of decode devices."""
        return Roofline(self.decode, self.model, self.decode_layout, self.efficiency)

    @cached_property
    def prefill_roofline(self) -> Roofline:
        """Steps of prefill devices."""
        return Roofline(self.prefill, self.model, self.prefill_layout, self.efficiency)

    def decode_work(self, sequences: int, context: float | None = None) -> StepWork:
        """A decode step of so many sequences, of the traffic's context or another."""
        reads = sequences * (self.traffic.context if context is None else context)
        return StepWork(decode_rows=sequences, decode_reads=reads, drafts=sequences * self.model.drafts)

    def decoding(self, sequences: int) -> Batch:
        """Decoding so many sequences together."""
        step_s = self.decode_roofline.seconds(self.decode_work(sequences))
        speed = (self.service.accepted if self.model.drafts else 1.0) / step_s
        return Batch(
            sequences=sequences,
            step_s=step_s,
            user_tokens_s=speed,
            tokens_s=sequences * speed / self.decode_roofline.cut,
        )

    def batches(self) -> list[Batch]:
        """All that fit, `GROWTH` apart."""
        room, size, found = self.decode_roofline.sequences(self.traffic.context), 1, []
        if not room:
            raise ConfigError(f"context: no sequence of {self.traffic.context:.0f} tokens fits beside the weights")
        while size < room:
            found.append(self.decoding(size))
            size = max(size + 1, int(size * GROWTH))
        return [*found, self.decoding(room)]

    def chosen(self) -> Batch:
        """The batch to run.

        Raises:
            ConfigError: No sequence fits, none is as fast as wanted, or more are wanted than fit.
        """
        service, found = self.service, self.batches()
        if service.batch:
            if service.batch > found[-1].sequences:
                raise ConfigError(f"batch: {service.batch} sequences are more than the {found[-1].sequences} that fit")
            return self.decoding(service.batch)
        if service.user_speed:
            fast = [batch for batch in found if batch.user_tokens_s >= service.user_speed]
            if not fast:
                raise ConfigError(
                    f"user_speed: {service.user_speed:g} tokens per second are more than the "
                    f"{found[0].user_tokens_s:.1f} of a sequence alone"
                )
            return max(fast, key=lambda batch: batch.tokens_s)
        return max(found, key=lambda batch: batch.tokens_s * batch.user_tokens_s)

    def prefill_work(self, chunk: int | None = None) -> StepWork:
        """A prefill step of so many tokens; by default a full one."""
        chunk = self.service.chunk if chunk is None else chunk
        return StepWork(chunk_tokens=chunk, chunk_reads=chunk * self.traffic.uncached_position)

    @property
    def prefill_useful(self) -> float:
        """Share of a prefill step's work that is for prompt tokens nobody has computed before.

        The rest are rows replayed behind a hit, and the last rows of a prompt in layers that others do not pass.
        """
        model, needed = self.model, self.traffic.uncached
        replayed = min(model.replay_tokens, self.traffic.prompt * self.traffic.hit_rate)
        tail = min(model.tail_tokens, self.traffic.prompt) * (model.active_decode / model.active_prompt - 1.0)
        return needed / (needed + replayed + tail) if needed else 0.0

    def plan(self) -> Plan:
        """The plan.

        Raises:
            ConfigError: No batch serves; see `chosen`.
        """
        traffic, service, model = self.traffic, self.service, self.model
        batch = self.chosen()
        decode_work, prefill_work = self.decode_work(batch.sequences), self.prefill_work()
        step_s = self.prefill_roofline.seconds(prefill_work)
        prefill_tokens_s = service.chunk * self.prefill_useful / step_s / self.prefill_roofline.cut
        requests_s = traffic.requests_day / DAY_S
        decode = requests_s * traffic.output * service.peak / batch.tokens_s
        prefill = requests_s * traffic.uncached * service.peak / (prefill_tokens_s * service.busy or 1.0)
        decode_devices = _whole(decode, self.decode_layout.width)
        prefill_devices = _whole(prefill, self.prefill_layout.width)
        devices = decode_devices + prefill_devices
        new_day = traffic.requests_day * (traffic.uncached + traffic.output) * model.stored_nbytes
        load = requests_s * service.peak * traffic.prompt * traffic.hit_rate * model.stored_nbytes
        handoff = traffic.prompt * model.stored_nbytes + model.window_nbytes
        network = prefill_devices * self.prefill.network_bytes_s
        paid = traffic.uncached * service.miss_usd + traffic.prompt * traffic.hit_rate * service.hit_usd
        paid += traffic.output * service.output_usd
        priced = self.prefill.usd_hour > 0 and self.decode.usd_hour > 0
        usd_s = (prefill_devices * self.prefill.usd_hour + decode_devices * self.decode.usd_hour) / 3600.0
        return Plan(
            decode_tokens_s=batch.tokens_s,
            user_tokens_s=batch.user_tokens_s,
            batch=batch.sequences,
            batch_room=self.decode_roofline.sequences(traffic.context),
            decode_step_s=batch.step_s,
            prefill_tokens_s=prefill_tokens_s,
            input_tokens_s=prefill_tokens_s / (1.0 - traffic.hit_rate) if traffic.uncached else 0.0,
            prefill_step_s=step_s,
            prefill_per_decode=prefill / decode,
            prefill_devices=prefill_devices,
            decode_devices=decode_devices,
            devices=devices,
            kv_nbytes_day=new_day,
            kv_3_days_nbytes=3.0 * new_day,
            kv_7_days_nbytes=7.0 * new_day,
            store_bytes_s=load,
            handoff_nbytes=handoff,
            network_share=max(load, requests_s * service.peak * handoff) / network if network else 0.0,
            revenue_usd_hour=requests_s * 3600.0 * paid / 1e6 / devices,
            usd_million=usd_s / (requests_s * traffic.output) * 1e6 if priced else 0.0,
            decode_limit=_limit(self.decode_roofline, decode_work),
            prefill_limit=_limit(self.prefill_roofline, prefill_work),
        )


def _whole(devices: float, width: int) -> int:
    return ceil(devices / width) * width


def _limit(roofline: Roofline, work: StepWork) -> str:
    longest = max(roofline.parts(work), key=lambda part: part.seconds)
    others = {"communication": roofline.communication(work), "latency": roofline.latency(work)}
    total = sum(part.seconds for part in roofline.parts(work))
    if others["communication"] > total:
        return "communication"
    if others["latency"] > longest.seconds:
        return "latency of kernels and collectives"
    return f"{'arithmetic' if longest.compute_s >= longest.memory_s else 'bytes'} of {longest.name}"
