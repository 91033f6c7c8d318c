"""Attention over paged keys and values, for chunks and single rows alike."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfra.executors.torch.batch import Batch
from deepinfra.executors.torch.kv import PagedKV

__all__ = ("attend",)


def attend(queries: Tensor, kv: PagedKV, layer: int, batch: Batch, window: int, sinks: Tensor | None = None) -> Tensor:
    """Attend every row of a step to the positions its sequence has so far.

    The query heads of one key-value head are folded into its rows, so that a decoding row is a matrix of several rows:
    torch's own attention is 4 to 13 times slower on single rows. Softmax is in float32.

    Args:
        queries: `[rows, heads, head_dim]`, already scaled.
        kv: Holds this step's keys and values too.
        layer: Which of its layers.
        batch: The step.
        window: The layer's window; 0 = none.
        sinks: `[heads]` in float32, logits that take part in softmax without a value.

    Returns:
        `[rows, heads * head_dim]`.
    """
    rows, heads, dim = queries.shape
    kv_heads = kv.num_kv_heads
    folded = heads // kv_heads
    out = torch.empty_like(queries)
    for group in batch.groups:
        seqs, count = group.seqs, group.queries
        own = slice(group.at, group.at + seqs * count)
        shape = (seqs, count, kv_heads, folded, dim)
        q = queries[own].view(shape).permute(2, 0, 3, 1, 4)  # [kv_heads, seqs, folded, count, dim]
        result = out[own].view(shape)
        for tile in group.tiles[window]:
            width = tile.last - tile.first
            matrix = q[:, :, :, tile.first : tile.last].reshape(kv_heads * seqs, folded * width, dim)
            keys, values = kv.read(layer, tile.pages)
            scores = torch.bmm(matrix, keys.view(kv_heads * seqs, -1, dim).transpose(1, 2))
            if tile.mask is not None:
                scores.view(kv_heads, seqs, folded, width, -1)[..., -tile.mask.shape[-1] :].add_(tile.mask)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(queries.dtype)
            mixed = torch.bmm(weights, values.view(kv_heads * seqs, -1, dim))
            mixed = mixed.view(kv_heads, seqs, folded, width, dim)
            if sinks is not None:  # softmax with one more logit is softmax times what is left of one
                total = torch.logsumexp(scores.float(), -1).view(kv_heads, seqs, folded, width)
                share = torch.sigmoid(total - sinks.view(kv_heads, 1, folded, 1))
                mixed = mixed * share.unsqueeze(-1).to(mixed.dtype)
            result[:, tile.first : tile.last] = mixed.permute(1, 3, 0, 2, 4)
    return out.view(rows, heads * dim)
