"""JSON on its way out."""

from __future__ import annotations

from typing import Any

import msgspec

from deepinfra.core.digits import Digits

__all__ = ("json_bytes",)


def _written(value: Any) -> msgspec.Raw:
    """What msgspec does not know by itself; of that only numbers that keep their digits occur."""
    if isinstance(value, Digits):
        return msgspec.Raw(value.text.encode())
    raise TypeError(f"there is no JSON for {type(value)}")


json_bytes = msgspec.json.Encoder(enc_hook=_written).encode
"""`json_bytes(value)`: compact JSON; numbers that a client sent are written as it wrote them."""
