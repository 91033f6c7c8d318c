"""`POST /v1/messages/count_tokens`: what a request's prompt would count."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfra.api.messages.request import MESSAGES
from deepinfra.api.protocol import Json, Received
from deepinfra.engine import Engine
from deepinfra.errors import ModelUnknownError
from deepinfra.interfaces.given import Offload

__all__ = ("TokenCount",)

_UNBOUNDED = 2**31


class TokenCount:
    """Takes the body of `POST /v1/messages` with or without `max_tokens`, so that both always count the same.

    Fields that change no prompt are checked all the same, and have no other effect.
    """

    def __init__(self, engines: Mapping[str, Engine], offload: Offload) -> None:
        self._engines, self._offload = engines, offload

    async def __call__(self, raw: Json, received: Received, params: Mapping[str, str]) -> Json:
        """See `endpoint.Query`.

        Raises:
            RequestError: As the request itself would be refused.
        """
        call = await self._offload(MESSAGES.parse, {"max_tokens": _UNBOUNDED, **raw}, received)
        engine = self._engines.get(call.model)
        if engine is None:
            raise ModelUnknownError(call.model, tuple(self._engines))
        return {"input_tokens": await engine.count(call.requests[0].input)}
