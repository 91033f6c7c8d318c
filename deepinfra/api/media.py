"""Images inside a request. None is fetched: a server that follows its callers' URLs reaches what they cannot."""

from __future__ import annotations

import base64
import binascii
import hashlib

from deepinfra.core.conversation import MediaPart
from deepinfra.errors import RequestError, UnsupportedFieldError

__all__ = ("image_part", "image_part_of_base64")

_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


def image_part(url: str, param: str) -> MediaPart:
    """An image from its `data:` URL; `param` names the field for errors.

    Raises:
        UnsupportedFieldError: Another kind of URL, or no image.
        RequestError: The data is not base64.
    """
    head, comma, data = url.partition(",")
    scheme, _, kind = head.partition(":")
    if scheme.lower() != "data" or not comma:
        raise UnsupportedFieldError(param, "must be a data: URL; this server fetches nothing")
    media_type, *options = kind.split(";")
    if "base64" not in options:
        raise UnsupportedFieldError(param, "must be a data: URL in base64")
    return image_part_of_base64(media_type, data, param)


def image_part_of_base64(media_type: str, data: str, param: str) -> MediaPart:
    """An image from its base64 text.

    Raises:
        UnsupportedFieldError: No media type of an image that models read.
        RequestError: The data is not base64, or empty.
    """
    if media_type.lower() not in _TYPES:
        raise UnsupportedFieldError(param, f"has a media type that is not supported; supported: {', '.join(_TYPES)}")
    try:
        image = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        image = b""
    if not image:
        raise RequestError(f"{param!r} is not base64", param)
    return MediaPart(data=image, digest=hashlib.sha256(image).digest(), media_type=media_type.lower())
