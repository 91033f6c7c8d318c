"""The parts that come with deepinfra: a plug-in like any other, found by its entry point.

Every factory imports what it makes, so that listing parts loads none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfra.executors.options import SimulatedOptions, ToyOptions
from deepinfra.executors.torch.options import TorchOptions
from deepinfra.interfaces import Executor, ExpertPlacer, KVStore, Recipe, Scheduler, Speculator
from deepinfra.kvstores.options import MemoryStoreOptions, SsdStoreOptions, TieredStoreOptions
from deepinfra.placers.options import EplbOptions, StaticPlacerOptions
from deepinfra.recipes.deepseek.options import DeepSeekOptions
from deepinfra.recipes.harmony.options import HarmonyOptions
from deepinfra.recipes.mistral.options import MistralOptions
from deepinfra.recipes.options import ChatTemplateOptions
from deepinfra.registry import Registry, hookimpl
from deepinfra.schedulers.options import BucketedOptions, FcfsOptions
from deepinfra.speculators.options import NgramOptions

__all__ = ("deepinfra_register",)


@hookimpl
def deepinfra_register(registry: Registry) -> None:
    """Register every built-in part."""
    registry.recipe("chat-template", _chat_template, options=ChatTemplateOptions)
    registry.recipe("deepseek", _deepseek, options=DeepSeekOptions)
    registry.recipe("harmony", _harmony, options=HarmonyOptions)
    registry.recipe("mistral", _mistral, options=MistralOptions)
    registry.scheduler("fcfs", _fcfs, options=FcfsOptions)
    registry.scheduler("bucketed", _bucketed, options=BucketedOptions)
    registry.kvstore("memory", _memory, options=MemoryStoreOptions)
    registry.kvstore("ssd", _ssd, options=SsdStoreOptions)
    registry.kvstore("tiered", _tiered, options=TieredStoreOptions, nested="tiers")
    registry.executor("torch", _torch, options=TorchOptions)
    registry.executor("toy", _toy, options=ToyOptions, process=False)
    registry.executor("simulated", _simulated, options=SimulatedOptions, process=False)
    registry.speculator("ngram", _ngram, options=NgramOptions)
    registry.placer("static", _static, options=StaticPlacerOptions)
    registry.placer("eplb", _eplb, options=EplbOptions)


def _chat_template(options: ChatTemplateOptions) -> Recipe:
    from deepinfra.recipes import ChatTemplate

    return ChatTemplate(**dict(options))


def _deepseek(options: DeepSeekOptions) -> Recipe:
    from deepinfra.recipes import DeepSeek

    return DeepSeek(**dict(options))


def _harmony(options: HarmonyOptions) -> Recipe:
    from deepinfra.recipes import Harmony

    return Harmony(**dict(options))


def _mistral(options: MistralOptions) -> Recipe:
    from deepinfra.recipes import Mistral

    return Mistral(**dict(options))


def _fcfs(options: FcfsOptions) -> Scheduler:
    from deepinfra.schedulers import Fcfs

    return Fcfs(**dict(options))


def _bucketed(options: BucketedOptions) -> Scheduler:
    from deepinfra.schedulers import Bucketed

    return Bucketed(**dict(options))


def _memory(options: MemoryStoreOptions) -> KVStore:
    from deepinfra.kvstores import MemoryStore

    return MemoryStore(**dict(options))


def _ssd(options: SsdStoreOptions) -> KVStore:
    from deepinfra.kvstores import SsdStore

    return SsdStore(**dict(options))


def _tiered(options: TieredStoreOptions, stores: Sequence[KVStore]) -> KVStore:
    from deepinfra.kvstores import Tier, TieredStore

    tiers = [Tier(store, dict(tier.write)) for store, tier in zip(stores, options.tiers, strict=True)]
    return TieredStore(**dict(options) | {"tiers": tiers})


def _torch(options: TorchOptions) -> Executor:
    from deepinfra.executors.torch import TorchExecutor

    return TorchExecutor(**dict(options))


def _toy(options: ToyOptions) -> Executor:
    from deepinfra.executors.toy import ToyExecutor

    return ToyExecutor(**dict(options))


def _simulated(options: SimulatedOptions) -> Executor:
    from deepinfra.executors.simulated import SimulatedExecutor

    return SimulatedExecutor(**dict(options))


def _ngram(options: NgramOptions) -> Speculator:
    from deepinfra.speculators import Ngram

    return Ngram(**dict(options))


def _static(options: StaticPlacerOptions) -> ExpertPlacer:
    from deepinfra.placers import StaticPlacer

    return StaticPlacer(**dict(options))


def _eplb(options: EplbOptions) -> ExpertPlacer:
    from deepinfra.placers import Eplb

    return Eplb(**dict(options))
