"""Schedulers: who runs next, and how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.schedulers.bucketed import Bucketed
    from deepinfra.schedulers.fcfs import Fcfs
    from deepinfra.schedulers.options import BucketedOptions, FcfsOptions

__all__ = ("Bucketed", "BucketedOptions", "Fcfs", "FcfsOptions")

__getattr__ = lazily(
    __name__,
    {
        "Bucketed": "deepinfra.schedulers.bucketed",
        "BucketedOptions": "deepinfra.schedulers.options",
        "Fcfs": "deepinfra.schedulers.fcfs",
        "FcfsOptions": "deepinfra.schedulers.options",
    },
)
