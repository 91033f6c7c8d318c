"""deepinfra: the whole LLM serving stack as an async framework of six swappable parts.

Names are loaded when first used: `import deepinfra` loads no torch, no starlette and no plug-in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfra.lazy import lazily

if TYPE_CHECKING:
    from deepinfra.api.app import asgi
    from deepinfra.config import from_toml, read_keys
    from deepinfra.core.conversation import Conversation, Message, TextPart
    from deepinfra.core.identity import ApiKey
    from deepinfra.core.request import GenerateRequest, TextInput
    from deepinfra.core.sampling import SamplingParams
    from deepinfra.engine import Engine, Pool

__all__ = (
    "ApiKey",
    "Conversation",
    "Engine",
    "GenerateRequest",
    "Message",
    "Pool",
    "SamplingParams",
    "TextInput",
    "TextPart",
    "__version__",
    "asgi",
    "from_toml",
    "read_keys",
)

__version__ = "0.1.0"

__getattr__ = lazily(
    __name__,
    {
        "ApiKey": "deepinfra.core.identity",
        "Conversation": "deepinfra.core.conversation",
        "Engine": "deepinfra.engine",
        "GenerateRequest": "deepinfra.core.request",
        "Message": "deepinfra.core.conversation",
        "Pool": "deepinfra.engine",
        "SamplingParams": "deepinfra.core.sampling",
        "TextInput": "deepinfra.core.request",
        "TextPart": "deepinfra.core.conversation",
        "asgi": "deepinfra.api.app",
        "from_toml": "deepinfra.config",
        "read_keys": "deepinfra.config.keys",
    },
)
