"""Which kernels compute a model, and in which form its weights are multiplied: from headers, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from deepinfra.errors import ConfigError
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.models import TensorSource
from deepinfra.models.cache import kernel_cache_dir

__all__ = (
    "Choice",
    "Kernels",
    "WeightForm",
    "by_torch",
    "choose",
    "invariant",
    "is_stored",
    "matrices",
    "matrix_nbytes",
    "numerics",
    "packed_nbytes",
    "survey",
)

Kernels = Literal["auto", "avx512", "avx2", "torch"]
WeightForm = Literal["auto", "stored", "dense"]

_GROUP: Final = 32
_STORED: Final[Mapping[str, int]] = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q4_K": 20,
    "Q5_0": 34,
    "Q5_1": 36,
    "Q5_K": 36,
    "Q6_K": 36,
    "Q8_0": 34,
}
"""Block formats that kernels multiply as they are, with the bytes that 32 weights take when packed."""

_TILE: Final = 32  # outputs are packed in tiles of so many


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and why.

    Attributes:
        kernels: What was asked for.
        paths: Paths of deepinfra-kernels to be tried, best first; without any, torch computes.
        why_path: The reason, in words.
        asked: The form of weights asked for.
        stored: Matrices in a block format are multiplied as stored (on a path of `paths` only).
        why_weights: The reason, in words.
        invariant: Nothing may take the path's place.
    """

    kernels: Kernels
    paths: tuple[str, ...]
    why_path: str
    asked: WeightForm
    stored: bool
    why_weights: str
    invariant: bool = False

    @property
    def path(self) -> str:
        """What will compute, if it can be built."""
        return self.paths[0] if self.paths else "torch"

    @property
    def weights(self) -> str:
        """`stored` or `dense`."""
        return "stored" if self.stored else "dense"


def choose(config: DecoderConfig, tensors: TensorSource, kernels: Kernels, weights: WeightForm) -> Choice:
    """Decide from settings, headers, this CPU, and whether there is a library or a compiler; builds nothing.

    Raises:
        ConfigError: What was asked for cannot run; names the option.
    """
    paths: tuple[str, ...] = ()
    why = "as configured"
    if kernels != "torch":
        paths, why = _paths(config, kernels)
    if not paths:
        return by_torch(kernels, weights, why)
    formats = sorted({tensors.info(name).dtype for name in matrices(config)})
    blocks = [name for name in formats if name in _STORED]
    if weights == "stored" and not blocks:
        raise ConfigError(f"weights = stored: the model's matrices are {', '.join(formats)}, not in blocks of integers")
    if weights == "dense":
        return Choice(kernels, paths, why, weights, False, "as configured")
    if not blocks:
        return Choice(kernels, paths, why, weights, False, f"the model's matrices are {', '.join(formats)}")
    return Choice(kernels, paths, why, weights, True, f"{', '.join(blocks)} times activations of 8 bits")


def by_torch(kernels: Kernels, weights: WeightForm, why: str) -> Choice:
    """The choice of torch, for a reason.

    Raises:
        ConfigError: Something else was asked for.
    """
    if kernels in ("avx512", "avx2"):
        raise ConfigError(f"kernels = {kernels} cannot run: {why}")
    if weights == "stored":
        raise ConfigError(f"weights = stored needs kernels, and torch computes here: {why}")
    why_weights = "as configured" if weights == "dense" else "torch multiplies decoded weights only"
    return Choice(kernels, (), why, weights, False, why_weights)


def invariant(choice: Choice) -> Choice:
    """The choice whose bits depend on nothing else: of one path, not of the first that can be built.

    Raises:
        ConfigError: torch computes, whose sums depend on the number of rows.
    """
    if not choice.paths:
        why = "sums of torch depend on the number of rows"
        if choice.kernels == "torch":
            raise ConfigError(f"batch_invariant cannot be kept with kernels = torch: {why}; leave kernels out")
        raise ConfigError(f"batch_invariant cannot be kept: {why}, and torch computes here: {choice.why_path}")
    return replace(choice, paths=choice.paths[:1], invariant=True)


def numerics(choice: Choice, config: DecoderConfig) -> str:
    """What decides what KV is worth beside weights and types: one text for each, and so KV of its own.

    Ordinary KV has no promised bits: paths share it where they multiply the same numbers, but with stored weights
    activations are rounded to 8 bits, and KV is another approximation of the model's. An invariant one names all that
    its bits depend on: kernels, and inverse frequencies, which numpy does not compute alike on all processors. No
    compiler and no C library: kernels fix each operation and its order, and call nothing that KV depends on.
    """
    if not choice.invariant:
        return f"ordinary {choice.weights}"
    from deepinfra_kernels.build import fingerprint

    angles = hashlib.sha256(config.rope.inv_freq.tobytes()).hexdigest()[:8]
    return f"batch-invariant {choice.path} {choice.weights} {fingerprint(choice.path)} {angles}"


def _paths(config: DecoderConfig, kernels: Kernels) -> tuple[tuple[str, ...], str]:
    """Paths that can be tried, and why these; or none, and why not."""
    if why := _unsupported(config):
        return (), why
    try:
        from deepinfra_kernels import build, cpu
    except ModuleNotFoundError:
        return (), "deepinfra-kernels is not installed (install deepinfra-serve[kernels])"
    wanted = tuple(cpu.PATHS) if kernels == "auto" else (kernels,)
    reasons: dict[str, list[str]] = {}
    found: list[str] = []
    for path in wanted:
        why = cpu.why_not(path) or build.why_not(path, kernel_cache_dir())
        if why:
            reasons.setdefault(why, []).append(path)
        else:
            found.append(path)
    if not found:
        if len(reasons) == 1:  # of all that were wanted
            return (), next(iter(reasons))
        return (), "; ".join(f"{', '.join(paths)}: {why}" for why, paths in reasons.items())
    chosen = "as configured" if kernels != "auto" else "the best that this CPU runs"
    return tuple(found), chosen


def survey() -> dict[str, str]:
    """Each path of the kernels, and how it stands with it on this machine; empty without deepinfra-kernels."""
    try:
        from deepinfra_kernels import build, cpu
    except ModuleNotFoundError:
        return {}
    cache, found = kernel_cache_dir(), dict[str, str]()
    for path in cpu.PATHS:
        why = cpu.why_not(path) or build.why_not(path, cache)
        built = "built" if build.cached(path, cache) else "to be built when first used, for half a minute"
        found[path] = why or built
    return found


def _unsupported(config: DecoderConfig) -> str:
    """Why the kernels cannot compute a model; empty if they can."""
    if config.experts is not None:
        return f"mixtures of experts ({config.family}) are computed by torch"
    if len(set(config.windows)) > 1:
        return f"layers of different windows ({config.family}) are computed by torch"
    if config.sandwich or config.sinks or config.norm_offset or config.local_rope is not None:
        return f"models of family {config.family} are computed by torch"
    if config.head_dim % 16 or not 32 <= config.head_dim <= 256:
        return f"heads of size {config.head_dim} are computed by torch"
    return ""


def matrices(config: DecoderConfig) -> list[str]:
    """Names of all matrices that rows are multiplied with, the head last."""
    names = [name for name, shape in config.shapes().items() if len(shape) == 2]
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return [name for name in names if name not in (head, "model.embed_tokens.weight")] + [head]


def packed_nbytes(config: DecoderConfig, tensors: TensorSource, *, stored: bool, itemsize: int) -> int:
    """Bytes of all weights as the kernels hold them: matrices packed, norms in float32, the embedding as it is stored.

    Args:
        config: The model.
        tensors: Its headers.
        stored: Matrices in a block format stay so.
        itemsize: Bytes of an element of the others.
    """
    shapes = config.shapes()
    total = tensors.info("model.embed_tokens.weight").nbytes
    for name in matrices(config):
        out, inputs = shapes[name]
        total += matrix_nbytes(tensors.info(name).dtype, out, inputs, stored=stored, itemsize=itemsize)
    return total + sum(4 * shape[0] for shape in shapes.values() if len(shape) == 1)


def matrix_nbytes(kind: str, out: int, inputs: int, *, stored: bool, itemsize: int) -> int:
    """Bytes of one packed matrix whose file has it in format `kind`."""
    rows = -(-out // _TILE) * _TILE
    if stored and is_stored(kind, inputs):
        return rows * inputs // _GROUP * _STORED[kind]
    return rows * -(-inputs * itemsize // 4) * 4


def is_stored(kind: str, inputs: int) -> bool:
    """Whether a matrix of this format can be multiplied as it is."""
    return kind in _STORED and inputs % _GROUP == 0
