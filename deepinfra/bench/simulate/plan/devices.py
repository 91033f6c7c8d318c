"""Devices by name: what their makers say they do, without sparsity.

Latencies are what 64 bytes take from end to end (arXiv 2505.09343, section 5.2): 3.33 us by NVLink, 3.7 us by
InfiniBand between two leaf switches. No collective is over sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepinfra.bench.simulate.plan.given import ZERO
from deepinfra.errors import ConfigError

__all__ = ("DEVICES", "Device", "device_named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device; all rates are peaks.

    Attributes:
        name: What it is asked for by.
        source: Where the figures come from.
        fp4_flops: FLOP/s of matrix products of 4-bit numbers.
        fp8_flops: The same of 8-bit numbers.
        bf16_flops: The same of 16-bit numbers.
        memory_nbytes: Of its own memory.
        memory_bytes_s: Of its own memory.
        link_bytes_s: Each way between it and the others of its scale-up domain.
        link_latency_s: Until a few bytes have arrived there.
        domain: Devices of a scale-up domain.
        network_bytes_s: Each way to devices of other domains.
        network_latency_s: Until a few bytes have arrived there.
        usd_hour: Price, 0 where none is known.
        sources: Of figures that have one of their own.
    """

    name: str
    source: str
    fp4_flops: float
    fp8_flops: float
    bf16_flops: float
    memory_nbytes: float
    memory_bytes_s: float
    link_bytes_s: float = field(default=0.0, metadata=ZERO)
    link_latency_s: float = field(default=3.33e-6, metadata=ZERO)
    domain: int = 1
    network_bytes_s: float = field(default=0.0, metadata=ZERO)
    network_latency_s: float = field(default=3.7e-6, metadata=ZERO)
    usd_hour: float = field(default=0.0, metadata=ZERO)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    def flops(self, precision: str) -> float:
        """Peak of a precision: `fp4`, `fp8` or `bf16`."""
        return float(getattr(self, f"{precision}_flops"))


_HOPPER = "NVIDIA H100 and H200 Tensor Core GPU datasheets (SXM, half of the sparse figures); ConnectX-7, 400 Gb/s"
_BLACKWELL = "NVIDIA HGX B200/B300 and GB200/GB300 NVL72 specifications (dense)"

_ALL = (
    Device(
        name="h100",
        source=_HOPPER,
        fp4_flops=1979e12,  # none of its own: unpacked to 8 bits
        fp8_flops=1979e12,
        bf16_flops=989.5e12,
        memory_nbytes=80e9,
        memory_bytes_s=3.35e12,
        link_bytes_s=450e9,
        domain=8,
        network_bytes_s=50e9,
    ),
    Device(
        name="h200",
        source=_HOPPER,
        fp4_flops=1979e12,
        fp8_flops=1979e12,
        bf16_flops=989.5e12,
        memory_nbytes=141e9,
        memory_bytes_s=4.8e12,
        link_bytes_s=450e9,
        domain=8,
        network_bytes_s=50e9,
    ),
    Device(
        name="h800",
        source="as the H100, with 400 GB/s of NVLink in both directions: arXiv 2505.09343, section 4.3; "
        "2 USD an hour: deepseek-ai/open-infra-index, day 6",
        fp4_flops=1979e12,
        fp8_flops=1979e12,
        bf16_flops=989.5e12,
        memory_nbytes=80e9,
        memory_bytes_s=3.35e12,
        link_bytes_s=200e9,
        domain=8,
        network_bytes_s=50e9,
        usd_hour=2.0,
    ),
    Device(
        name="b200",
        source=f"{_BLACKWELL}; ConnectX-7, 400 Gb/s",
        fp4_flops=9e15,
        fp8_flops=4.5e15,
        bf16_flops=2.25e15,
        memory_nbytes=180e9,
        memory_bytes_s=7.7e12,
        link_bytes_s=900e9,
        domain=8,
        network_bytes_s=50e9,
    ),
    Device(
        name="gb200",
        source=f"{_BLACKWELL}; ConnectX-7, 400 Gb/s",
        fp4_flops=10e15,
        fp8_flops=5e15,
        bf16_flops=2.5e15,
        memory_nbytes=186e9,
        memory_bytes_s=8e12,
        link_bytes_s=900e9,
        domain=72,
        network_bytes_s=50e9,
    ),
    Device(
        name="b300",
        source=f"{_BLACKWELL}; ConnectX-8, 800 Gb/s",
        fp4_flops=13.5e15,
        fp8_flops=4.5e15,
        bf16_flops=2.25e15,
        memory_nbytes=270e9,
        memory_bytes_s=7.7e12,
        link_bytes_s=900e9,
        domain=8,
        network_bytes_s=100e9,
    ),
    Device(
        name="gb300",
        source=f"{_BLACKWELL}; ConnectX-8, 800 Gb/s",
        fp4_flops=15e15,
        fp8_flops=5e15,
        bf16_flops=2.5e15,
        memory_nbytes=279e9,
        memory_bytes_s=8e12,
        link_bytes_s=900e9,
        domain=72,
        network_bytes_s=100e9,
    ),
    Device(
        name="laptop",
        source="Intel Core i5-7200U specifications: 2 cores at 2.5 GHz, each two 256-bit FMA in a cycle; 34.1 GB/s",
        fp4_flops=160e9,
        fp8_flops=160e9,
        bf16_flops=160e9,
        memory_nbytes=16e9,
        memory_bytes_s=34.1e9,
    ),
)

DEVICES = {device.name: device for device in _ALL}
"""Those known by name."""


def device_named(name: str, known: Mapping[str, Device] = DEVICES) -> Device:
    """A device by its name.

    Raises:
        ConfigError: Nobody has that name.
    """
    try:
        return known[name]
    except KeyError:
        raise ConfigError(f"device: none is named {name!r}; known: {', '.join(known)}") from None
