"""Signatures of thinking blocks: Anthropic's prove that it wrote the text, ours carry a text that was not shown."""

from __future__ import annotations

import base64
import binascii

__all__ = ("sealed", "unsealed")

_SHOWN = "deepinfra"
_SEAL = "deepinfra:"


def sealed(reasoning: str, *, shown: bool) -> str:
    """A signature; clients send it back as it is. It hides nothing from anybody who wants to read it."""
    return _SHOWN if shown else _SEAL + base64.b64encode(reasoning.encode()).decode()


def unsealed(thinking: str, signature: str) -> str:
    """The reasoning of a block that came back; empty if somebody else hid it.

    Raises:
        ValueError: The signature is ours and was damaged.
    """
    if thinking or not signature.startswith(_SEAL):
        return thinking
    try:
        return base64.b64decode(signature.removeprefix(_SEAL), validate=True).decode()
    except (ValueError, binascii.Error):
        raise ValueError("was damaged since this server wrote it") from None
