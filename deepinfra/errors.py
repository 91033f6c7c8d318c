"""The whole error tree. Every error has a `code`, the word a client or an operator can search for.

    DeepinfraError
    ├── ConfigError                 invalid-config        a setting is wrong; nothing was started
    │   ├── UnknownComponentError   unknown-component     no part of that name
    │   ├── PluginError             plugin-error          a plug-in cannot be loaded or misuses a hook
    │   │   └── PluginConflictError plugin-conflict       two plug-ins claim one name
    │   └── UnsupportedCombination  unsupported-combination   parts whose needs do not fit each other
    ├── ModelError                  invalid-model         a model's files cannot be used
    │   ├── ModelNotFoundError      model-not-found       no such path, catalogue name or hub id
    │   ├── UnsupportedModelError   unsupported-model     a field or format with an effect that is not implemented
    │   └── ModelDownloadError      model-download        the files could not be fetched
    ├── ResourceError               out-of-resources      memory, disk or a port that is not there
    ├── RequestError                invalid-request       the caller's request is wrong (4xx)
    │   ├── UnsupportedFieldError   unsupported-parameter a field with an effect that is not honoured
    │   ├── ContextLengthError      context-length-exceeded
    │   ├── TemplateError           template-error        the model's template refuses this conversation
    │   ├── InvalidJsonError        invalid-json          the body is no JSON value that can be served
    │   ├── BodyTooLargeError       body-too-large        the body has more bytes than the server takes (413)
    │   ├── UnauthorizedError       unauthorized          no API key, or one that is not known (401)
    │   ├── ModelUnknownError       model-unknown         no engine of that name (404)
    │   └── NotStoredError          not-stored            no stored response or item of that id for this tenant (404)
    ├── Overloaded                  overloaded            the server is full; try again after `retry_after_s` (503)
    │   ├── TenantFullError         tenant-full           the tenant's own limit of what may wait (429)
    │   └── RateLimitedError        rate-limited          the API key's own limit of requests (429)
    ├── EngineError                 engine-error          the engine cannot serve this (5xx)
    │   ├── EngineNotRunningError   engine-not-running    nobody entered the engine
    │   ├── EngineDrainingError     engine-draining       shutting down, no new requests
    │   ├── PoolFailedError         pool-failed           the executor was lost too often, or a part is broken
    │   ├── DeadlineExceededError   deadline-exceeded     the request's own deadline passed
    │   ├── ConstraintFailedError   constraint-failed     what the answer must match cannot be continued
    │   └── ClientTimeoutError      client-timeout        nobody read the stream for too long
    ├── ExecutorError               executor-error
    │   ├── StepFailed              step-failed           one step failed for these sequences; the executor lives
    │   └── ExecutorLost            executor-lost         the executor is gone; it may be entered again
    ├── ReceiptError                invalid-receipt       a receipt cannot be read, or was altered
    └── InjectionError              injection             a control token would come from user text (an incident)

Constructors take facts and build the sentence, so that the same situation always reads the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = (
    "BodyTooLargeError",
    "ClientTimeoutError",
    "ConfigError",
    "ConstraintFailedError",
    "ContextLengthError",
    "DeadlineExceededError",
    "DeepinfraError",
    "EngineDrainingError",
    "EngineError",
    "EngineNotRunningError",
    "ExecutorError",
    "ExecutorLost",
    "InjectionError",
    "InvalidJsonError",
    "ModelDownloadError",
    "ModelError",
    "ModelNotFoundError",
    "ModelUnknownError",
    "NotStoredError",
    "Overloaded",
    "PluginConflictError",
    "PluginError",
    "PoolFailedError",
    "RateLimitedError",
    "ReceiptError",
    "RequestError",
    "ResourceError",
    "StepFailed",
    "TemplateError",
    "TenantFullError",
    "UnauthorizedError",
    "UnknownComponentError",
    "UnsupportedCombination",
    "UnsupportedFieldError",
    "UnsupportedModelError",
)


class DeepinfraError(Exception):
    """Root of every error this package raises on purpose; `str(error)` is one sentence for a person."""

    code: ClassVar[str] = "deepinfra-error"


# -- configuration --------------------------------------------------------------------------------


class ConfigError(DeepinfraError):
    """Raised when a setting is unknown, of the wrong type or out of range; names the setting and its source."""

    code = "invalid-config"


class UnknownComponentError(ConfigError):
    """Raised when no part of a kind has the wanted name."""

    code = "unknown-component"

    def __init__(self, kind: str, name: str, known: Sequence[str], where: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        place = f" ({where})" if where else ""
        super().__init__(f"no {kind} is named {name!r}; known: {', '.join(sorted(known)) or 'none'}{place}")


class PluginError(ConfigError):
    """Raised when a plug-in cannot be imported, misspells a hook or registers something invalid."""

    code = "plugin-error"


class PluginConflictError(PluginError):
    """Raised when two distributions claim the same name for the same kind of part."""

    code = "plugin-conflict"

    def __init__(self, kind: str, name: str, first: str, second: str) -> None:
        self.kind, self.name, self.first, self.second = kind, name, first, second
        super().__init__(f"{kind} {name!r} is registered by both {first} and {second}; remove one of them")


class UnsupportedCombination(ConfigError):
    """Raised when the chosen parts cannot work together (one needs what another does not provide)."""

    code = "unsupported-combination"


# -- models ---------------------------------------------------------------------------------------


class ModelError(DeepinfraError):
    """Raised when a model's files are damaged, incomplete or contradictory."""

    code = "invalid-model"


class ModelNotFoundError(ModelError):
    """Raised when a name is no path, no catalogue entry and no hub id that exists."""

    code = "model-not-found"


class UnsupportedModelError(ModelError):
    """Raised, before weights are read, when a model needs something that is not implemented; names the field."""

    code = "unsupported-model"

    def __init__(self, field: str, value: object, why: str = "is not implemented") -> None:
        self.field, self.value = field, value
        super().__init__(f"model field {field} = {value!r} {why}")


class ModelDownloadError(ModelError):
    """Raised when a model could not be fetched; says whether trying again can help."""

    code = "model-download"


class ResourceError(DeepinfraError):
    """Raised when memory, disk space, a port or another resource of the machine is missing."""

    code = "out-of-resources"


# -- requests -------------------------------------------------------------------------------------


class RequestError(DeepinfraError):
    """Raised when the caller's request is wrong; `param` is the path of the field in the caller's own words."""

    code = "invalid-request"

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class UnsupportedFieldError(RequestError):
    """Raised when a request carries a field that has an effect which is not honoured here."""

    code = "unsupported-parameter"

    def __init__(self, param: str, why: str = "is not supported by this server") -> None:
        super().__init__(f"{param!r} {why}", param)


class ContextLengthError(RequestError):
    """Raised when prompt and requested output do not fit the model's or the pool's context."""

    code = "context-length-exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int | None, limit: int, param: str | None = None) -> None:
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit
        wanted = prompt_tokens + (max_tokens or 1)
        detail = f"{prompt_tokens} in the prompt" + (f", {max_tokens} for the output" if max_tokens else "")
        super().__init__(
            f"This model's maximum context length is {limit} tokens. "
            f"However, you requested {wanted} tokens ({detail}).",
            param,
        )


class TemplateError(RequestError):
    """Raised when the model's chat template refuses a conversation; carries the template's own message."""

    code = "template-error"


class InvalidJsonError(RequestError):
    """Raised when a body is not JSON, or JSON that no text of ours can hold (NaN, lone surrogates, repeated keys)."""

    code = "invalid-json"


class BodyTooLargeError(RequestError):
    """Raised when a request's body has more bytes than the server takes."""

    code = "body-too-large"

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        super().__init__(f"the request's body is larger than {limit_nbytes} bytes")


class UnauthorizedError(RequestError):
    """Raised when a request comes without an API key that this server knows."""

    code = "unauthorized"

    def __init__(self, *, missing: bool) -> None:
        super().__init__(
            "no API key was sent; put one into the header 'authorization: Bearer KEY' or 'x-api-key: KEY'"
            if missing
            else "the API key is not one of this server's"
        )


class ModelUnknownError(RequestError):
    """Raised when a request names a model that this server does not serve."""

    code = "model-unknown"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        self.model, self.known = model, tuple(known)
        super().__init__(f"The model {model!r} does not exist here; served: {', '.join(known)}", "model")


class NotStoredError(RequestError):
    """Raised when a request names a stored thing that is not there, or is another tenant's; one is like the other."""

    code = "not-stored"

    def __init__(self, kind: str, name: str, param: str | None = None) -> None:
        super().__init__(f"{kind} with id {name[:64]!r} not found.", param)


class Overloaded(DeepinfraError):
    """Raised when a request is not admitted now; `retry_after_s` is the predicted wait in seconds."""

    code = "overloaded"

    def __init__(self, why: str, retry_after_s: float = 1.0) -> None:
        self.why, self.retry_after_s = why, retry_after_s
        super().__init__(f"{why}; try again in {max(1, round(retry_after_s))} s")


class TenantFullError(Overloaded):
    """Raised when as much of a tenant waits as its own limits allow, whatever others have waiting."""

    code = "tenant-full"


class RateLimitedError(Overloaded):
    """Raised when a caller makes more requests than its API key allows."""

    code = "rate-limited"


class ReceiptError(DeepinfraError):
    """Raised when a receipt cannot be read: names the field that is wrong, or says that it was altered."""

    code = "invalid-receipt"


class InjectionError(DeepinfraError):
    """Raised when rendering would turn user text into a control token: the request is not served."""

    code = "injection"


# -- engine ---------------------------------------------------------------------------------------


class EngineError(DeepinfraError):
    """Raised, or sent as an error event, when the engine cannot finish a request."""

    code = "engine-error"


class EngineNotRunningError(EngineError):
    """Raised when a request reaches an engine that nobody entered."""

    code = "engine-not-running"

    def __init__(self) -> None:
        super().__init__(
            "the engine is not running: a mounted app's lifespan is not run by its parent; "
            "give the parent `lifespan=llm.lifespan`, or serve inside `async with engine:`"
        )


class EngineDrainingError(EngineError):
    """Raised when the engine shuts down and takes no new requests."""

    code = "engine-draining"

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new requests")


class PoolFailedError(EngineError):
    """Raised when a pool no longer serves: its executor was lost too often, or a part of it is broken."""

    code = "pool-failed"

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the pool no longer serves: {why}")


class DeadlineExceededError(EngineError):
    """Raised when a request's own deadline passed before its answer was complete."""

    code = "deadline-exceeded"

    def __init__(self, deadline_s: float) -> None:
        super().__init__(f"the request's deadline of {deadline_s:g} s passed")


class ConstraintFailedError(EngineError):
    """Raised when an answer cannot go on within its constraint: no token is allowed, or matching became too costly."""

    code = "constraint-failed"

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the answer cannot go on within its constraint: {why}")


class ClientTimeoutError(EngineError):
    """Raised when nobody read a stream for `client_timeout_s`."""

    code = "client-timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"nobody read this stream for {timeout_s:g} s")


# -- executors ------------------------------------------------------------------------------------


class ExecutorError(DeepinfraError):
    """Raised by `StepHandle.result()` and `KVMemory` calls."""

    code = "executor-error"


class StepFailed(ExecutorError):
    """Raised when one step failed for `seqs` (sequence numbers); the executor is well and takes the next step."""

    code = "step-failed"

    def __init__(self, seqs: Sequence[int], why: str) -> None:
        self.seqs, self.why = tuple(seqs), why
        super().__init__(f"the step failed: {why}")


class ExecutorLost(ExecutorError):
    """Raised when the executor is gone (its process died, a step took too long); all device state is lost."""

    code = "executor-lost"
