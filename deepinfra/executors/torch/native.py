"""Steps computed by deepinfra-kernels, each in one call; without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from deepinfra_kernels.decoder import Decoder, Layer, Spec, Step
from deepinfra_kernels.library import Library
from deepinfra_kernels.sampling import Sampler
from numpy.typing import NDArray

from deepinfra.executors.torch.choice import matrices
from deepinfra.executors.torch.decoder import DecoderConfig
from deepinfra.executors.torch.native_kv import NativeKV
from deepinfra.executors.torch.rows import Drawn, Row, Rows, StepModel
from deepinfra.executors.torch.sampler import sample
from deepinfra.executors.torch.weights.pack import SOURCES, Packer
from deepinfra.models import TensorSource

__all__ = ("Native", "load_native")


class Native(StepModel):
    """A decoder of the kernels with its KV.

    Args:
        decoder: With its weights.
        sampler: Draws its tokens.
    """

    def __init__(self, decoder: Decoder, sampler: Sampler) -> None:
        self._decoder, self._sampler = decoder, sampler
        self._logits: NDArray[np.float32] | None = None

    def compute(self, items: Sequence[Rows]) -> list[bool]:
        """See `StepModel.compute`."""
        counts = np.array([len(item.tokens) for item in items], np.int64)
        lasts = np.cumsum(counts)
        wants = [item.wanted for item in items]
        if max(wants) > 1:  # with drafts
            wanted = np.concatenate([np.arange(last - want, last) for last, want in zip(lasts, wants, strict=True)])
        else:
            wanted = lasts[np.array(wants, np.bool_)] - 1
        step = Step(
            tokens=np.concatenate([item.tokens for item in items]),
            counts=counts,
            starts=np.array([item.start for item in items], np.int64),
            write_froms=np.array([item.write_from for item in items], np.int64),
            ends=np.cumsum([len(item.table) for item in items], dtype=np.int64),
            blocks=np.concatenate([item.table for item in items], dtype=np.int64),
            wanted=wanted,
        )
        self._logits, finite = self._decoder.step(step)
        fine: list[bool] = np.logical_and.reduceat(finite, lasts - counts).tolist()
        return fine

    def sample(self, rows: Sequence[Row]) -> list[Drawn]:
        """See `StepModel.sample`."""
        assert self._logits is not None
        return sample(self._logits, rows, self._sampler)

    def logits(self) -> NDArray[np.float32]:
        """See `StepModel.logits`."""
        assert self._logits is not None
        return self._logits

    def seconds(self) -> dict[str, float]:
        """See `StepModel.seconds`: by `deepinfra_kernels.decoder.PARTS`."""
        return self._decoder.seconds()


def load_native(
    library: Library,
    tensors: TensorSource,
    config: DecoderConfig,
    *,
    dtype: str,
    stored: bool,
    num_blocks: int,
    block_size: int,
    threads: int,
    max_rows: int,
    checkpoint: Callable[[], None],
) -> tuple[Native, NativeKV]:
    """Read and pack a model's weights and make room for its KV; to be called on the thread that will run its steps.

    Args:
        library: Of the path that will compute.
        tensors: The model's files; what of them is not needed again is given back.
        config: What it is made of.
        dtype: Element type of KV, and of matrices that are not stored in blocks.
        stored: Matrices in blocks of integers are multiplied as they are.
        num_blocks: Blocks of KV.
        block_size: Positions of each.
        threads: That compute.
        max_rows: Most rows of a step.
        checkpoint: Called before each tensor; raises to give up.
    """
    packer = Packer(library, tensors, dtype=dtype, stored=stored, threads=threads, checkpoint=checkpoint)
    packed = packer.matrices([name.removesuffix(".weight") for name in matrices(config)])
    layers = []
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        attention, gated = f"{at}self_attn.", f"{at}mlp."
        layers.append(
            Layer(
                query=packed[f"{attention}q_proj"],
                key=packed[f"{attention}k_proj"],
                value=packed[f"{attention}v_proj"],
                output=packed[f"{attention}o_proj"],
                gate=packed[f"{gated}gate_proj"],
                up=packed[f"{gated}up_proj"],
                down=packed[f"{gated}down_proj"],
                before=packer.vector(f"{at}input_layernorm.weight"),
                between=packer.vector(f"{at}post_attention_layernorm.weight"),
                query_norm=packer.vector(f"{attention}q_norm.weight") if config.qk_norm else None,
                key_norm=packer.vector(f"{attention}k_norm.weight") if config.qk_norm else None,
            )
        )
    table = "model.embed_tokens.weight"
    norm = packer.vector("model.norm.weight")
    tensors.release()
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    kv = NativeKV(library, config, itemsize, num_blocks, block_size)
    decoder = Decoder(
        library,
        spec_of(config),
        layers,
        head=packed["model.embed_tokens" if config.tied else "lm_head"],
        norm=norm,
        embedding=tensors.raw(table),  # mapped: rows are read from the file as tokens name them
        embedding_source=SOURCES[tensors.info(table).dtype],
        kv=kv.words,
        threads=threads,
        max_rows=max_rows,
    )
    return Native(decoder, Sampler(library, threads)), kv


def spec_of(config: DecoderConfig) -> Spec:
    """Sizes and constants as the kernels take them."""
    return Spec(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        eps=config.rms_eps,
        query_scale=config.query_scale,
        inv_freq=config.rope.inv_freq,
        rope_factor=config.rope.factor,
        embedding_scale=config.embedding_scale,
        activation=config.activation,
        window=config.windows[0],
    )
