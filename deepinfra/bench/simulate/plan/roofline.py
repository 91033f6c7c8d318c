"""How long a step takes on devices of which only peaks are known.

A step is its parts, one after another: projections, experts, attention, what only moves bytes, and the draft head. Each
part takes what its arithmetic or its bytes take, whichever is more. Communication goes on meanwhile and counts only if
it takes longer than all parts; the latency of collectives and of kernels adds up, since each waits for the one before.

Source: the roofline model (Williams, Waterman, Patterson, CACM 2009), part by part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log, sqrt
from typing import TYPE_CHECKING, NamedTuple

from deepinfra.bench.simulate.plan.given import SHARE, ZERO
from deepinfra.bench.simulate.plan.shape import NBYTES
from deepinfra.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepinfra.bench.simulate.plan.devices import Device
    from deepinfra.bench.simulate.plan.shape import ModelShape
    from deepinfra.core.cost import StepWork

__all__ = ("Efficiency", "Layout", "Part", "Roofline")

_KERNELS = {
    "products": "1550 of 1979 TFLOPS on H800: DeepGEMM README",
    "prompt_attention": "1450 of 2250 TFLOPS on B200, sparse prefill: FlashMLA README",
    "decode_attention": "660 of 989 TFLOPS on H800, dense decoding: FlashMLA README",
    "gathered_attention": "410 of 989 TFLOPS on H800, sparse decoding: FlashMLA README",
    "memory": "3000 of 3350 GB/s on H800: FlashMLA README",
    "link": "726 and 740 of 900 GB/s on SM100: DeepEP README",
    "kernel_s": "assumed: what a kernel of a captured graph takes to begin and to end",
    "memory_used": "vLLM's and DeepInfer's default of gpu_memory_utilization",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What of the peaks the best public kernels reach; none is fitted to a serving engine.

    Attributes:
        products: Matrix products, share of peak.
        prompt_attention: Attention of prompts, share of peak.
        decode_attention: Attention of decoding sequences over all their context, share of peak.
        gathered_attention: The same over selected entries and windows, share of peak.
        memory: Share of the bandwidth of the device's memory.
        link: Share of the bandwidth between devices.
        kernel_s: What a kernel takes besides.
        memory_used: Share of memory that weights and KV may fill.
        source: Of those that have none of their own.
        sources: Of each.
    """

    products: float = field(default=0.78, metadata=SHARE)
    prompt_attention: float = field(default=0.64, metadata=SHARE)
    decode_attention: float = field(default=0.67, metadata=SHARE)
    gathered_attention: float = field(default=0.41, metadata=SHARE)
    memory: float = field(default=0.90, metadata=SHARE)
    link: float = field(default=0.81, metadata=SHARE)
    kernel_s: float = field(default=2e-6, metadata=ZERO)
    memory_used: float = field(default=0.90, metadata=SHARE)
    source: str = "public kernels"
    sources: Mapping[str, str] = field(default_factory=lambda: _KERNELS, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model lies on `width` devices that step together.

    A dense model is cut through all its matrices (tensor parallel). One of experts spreads those, everything else is on
    each device, which has sequences of its own (expert parallel with attention data-parallel).

    Attributes:
        width: Devices.
        spares: Further copies of popular experts per layer, on all devices together.
        source: Where this comes from.
        sources: Of figures that have one of their own.
    """

    width: int = 1
    spares: int = field(default=0, metadata=ZERO)
    source: str = "chosen"
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)


class Part(NamedTuple):
    """One kind of work in a step: seconds that its arithmetic and its bytes take."""

    name: str
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The longer of both."""
        return max(self.compute_s, self.memory_s)


class Roofline:
    """Steps of one model on one device of a layout, or on all of them together if they share every sequence.

    Raises:
        ConfigError: The weights do not fit.
    """

    def __init__(
        self, device: Device, model: ModelShape, layout: Layout | None = None, efficiency: Efficiency | None = None
    ) -> None:
        self.device, self.model = device, model
        self.layout = layout or Layout()
        self.efficiency = efficiency or Efficiency()
        self.cut = 1 if model.experts else self.layout.width
        """Devices that share each sequence: what a step of this roofline runs on."""
        if self.layout.width > 1 and not (device.link_bytes_s if self._near else device.network_bytes_s):
            way = "link_bytes_s" if self._near else "network_bytes_s"
            raise ConfigError(f"device.{way}: {device.name} has none, for a layout of {self.layout.width} devices")
        if self.kv_nbytes <= 0:
            raise ConfigError(
                f"layout.width: {model.name} has {self.weights_nbytes / 1e9:.0f} GB of weights per device on "
                f"{self.layout.width} x {device.name}, which has {device.memory_nbytes / 1e9:.0f} GB"
            )

    @property
    def weights_nbytes(self) -> float:
        """On each device."""
        model, width = self.model, self.layout.width
        experts = self._slots * model.expert_layers * model.expert_nbytes
        return (model.dense_nbytes + model.embed_nbytes) / self.cut + experts + model.draft_nbytes / width

    @property
    def kv_nbytes(self) -> float:
        """Room for KV of the sequences that one step runs: of all devices that share them."""
        return (self.device.memory_nbytes * self.efficiency.memory_used - self.weights_nbytes) * self.cut

    def sequences(self, context: float) -> int:
        """How many sequences of this mean context fit."""
        return int(self.kv_nbytes / (context * self.model.stored_nbytes + self.model.window_nbytes))

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step; expert parallel: of one in which every device does as much."""
        return max(sum(part.seconds for part in self.parts(work)), self.communication(work)) + self.latency(work)

    def parts(self, work: StepWork) -> tuple[Part, ...]:
        """What the step is made of."""
        model, reached = self.model, self.efficiency.products
        decoded = work.decode_rows + work.drafts
        share = 1.0 if decoded else model.active_prompt / model.active_decode
        dense = 2.0 * (model.prompt_params * work.chunk_tokens + model.decode_params * decoded)
        drafting = 2.0 * model.draft_params * work.drafts
        draft_nbytes = model.draft_nbytes / self.layout.width if work.drafts else 0.0
        return (
            self._part("projections", share * model.dense_nbytes, (dense, model.dense_precision, reached)),
            *self._experts(work.chunk_tokens, decoded),
            *self._attention(work, decoded),
            self._part("moving", model.moved_nbytes * (share * work.chunk_tokens + decoded)),
            self._part("drafting", draft_nbytes, (drafting, model.dense_precision, reached)),
        )

    def communication(self, work: StepWork) -> float:
        """Seconds that the slowest of a device's ways to others is busy.

        Between domains a prompt's row travels once to each that has one of its experts, and is spread there by links. A
        decoded row travels to every device that has one, which takes longer and begins sooner.

        Source: DeepEP's normal and low-latency kernels.
        """
        model, width = self.model, self.layout.width
        if width == 1:
            return 0.0
        decoded, domains = work.decode_rows + work.drafts, width / self.device.domain
        rate = self.efficiency.link * (self.device.link_bytes_s if self._near else self.device.network_bytes_s)
        if not model.experts:  # two all-reduces per layer
            places = width if self._near else domains
            rows = model.layers * (work.chunk_tokens + decoded)
            return 2.0 * rows * 2.0 * (places - 1) / places * model.hidden * NBYTES["bf16"] / rate
        each = 1.0 - (1.0 - 1.0 / width) ** model.top_k  # chance that a device has one of a row's experts
        alone = (width - (1 if self._near else self.device.domain)) * each
        spread = alone if self._near else (domains - 1) * (1.0 - (1.0 - 1.0 / domains) ** model.top_k)
        sent = model.prompt_expert_layers * work.chunk_tokens * spread + model.expert_layers * decoded * alone
        return sent * model.hidden * (NBYTES["fp8"] + NBYTES["bf16"]) / rate  # there in 8 bits, back in 16

    def latency(self, work: StepWork) -> float:
        """Seconds of a step in which neither arithmetic nor bytes are the reason: kernels and collectives, in turn."""
        decoded = work.decode_rows + work.drafts
        share = 1.0 if decoded or not self.model.experts else self.model.prompt_expert_layers / self.model.layers
        each = self.device.link_latency_s if self._near else self.device.network_latency_s
        collectives = 2 * self.model.layers if self.layout.width > 1 else 0
        return share * (self.model.kernels * self.efficiency.kernel_s + collectives * each)

    @property
    def _near(self) -> bool:
        """Whether all devices of the layout are in one domain."""
        return self.layout.width <= self.device.domain

    @property
    def _slots(self) -> float:
        """Experts per device and layer."""
        return (self.model.experts + self.layout.spares) / self.layout.width if self.model.experts else 0.0

    def _part(self, name: str, nbytes: float, *products: tuple[float, str, float]) -> Part:
        """Of bytes, and of products: FLOPs, their precision, and the share of peak that they reach."""
        compute = sum(flops / (self.device.flops(precision) * reached) for flops, precision, reached in products)
        moved = nbytes / (self.device.memory_bytes_s * self.efficiency.memory)
        return Part(name, compute / self.cut, moved / self.cut)

    def _experts(self, chunk: int, decoded: int) -> tuple[Part, ...]:
        """Experts of the fullest device: routing is at random, and the step waits for it."""
        model, width = self.model, self.layout.width
        passes = model.prompt_expert_layers * chunk + model.expert_layers * decoded
        if not model.experts or not passes:
            return ()
        layers = model.expert_layers if decoded else model.prompt_expert_layers
        rows = width * passes / layers  # of the group, in a layer
        assigned = max(1.0, rows * model.top_k / width)  # to a device, in a layer
        fullest = 1.0 + sqrt(2.0 * log(width) / assigned)
        touched = self._slots * (1.0 - (1.0 - model.top_k / model.experts) ** rows)
        flops = 2.0 * model.top_k * model.expert_params * passes * fullest
        nbytes = touched * layers * model.expert_nbytes
        return (self._part("experts", nbytes, (flops, model.expert_precision, self.efficiency.products)),)

    def _attention(self, work: StepWork, decoded: int) -> tuple[Part, ...]:
        """Of prompts and of decoding sequences; keys of a chunk are read once for many of its rows."""
        model, reached, kind = self.model, self.efficiency, self.model.attend_token_precision
        parts = []
        if work.chunk_tokens:
            same = model.prompt_attend_flops * work.chunk_tokens
            grown = model.prompt_attend_token_flops * work.chunk_reads
            share = reached.prompt_attention
            parts.append(self._part("prompt attention", 0.0, (same, "bf16", share), (grown, kind, share)))
        if decoded:
            same = model.attend_flops * decoded
            grown = model.attend_token_flops * work.decode_reads * decoded / max(1, work.decode_rows)
            nbytes = model.read_nbytes * work.decode_rows + model.read_token_nbytes * work.decode_reads
            products = (same, "bf16", reached.gathered_attention), (grown, kind, reached.decode_attention)
            parts.append(self._part("decode attention", nbytes, *products))
        return tuple(parts)
