"""A deepinfra plug-in: registers the speculator `repeat`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from deepinfra.interfaces import Speculator
from deepinfra.registry import Registry, hookimpl

__all__ = ("RepeatOptions", "deepinfra_register")


class RepeatOptions(BaseModel):
    """Settings of `Repeat`; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_drafts: int = Field(3, ge=1, le=16, description="most tokens to guess at once")


@hookimpl
def deepinfra_register(registry: Registry) -> None:
    """Tell deepinfra what there is; runs at every start, so import the part inside the factory."""
    registry.speculator("repeat", _repeat, options=RepeatOptions)


def _repeat(options: RepeatOptions) -> Speculator:
    from deepinfra_plugin_template.repeat import Repeat

    return Repeat(max_drafts=options.max_drafts)
