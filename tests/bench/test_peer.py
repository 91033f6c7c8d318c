from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from deepinfra.bench.peer import TransformersPeer
from deepinfra.executors.torch import TorchExecutor
from deepinfra.models import Model, open_model
from deepinfra.testing.host import Host

PROMPTS = [tuple(range(start, start + 12)) for start in (3, 40, 77)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=request.param,
    )
    path: Path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return open_model(str(path))


async def test_the_peer_computes_what_we_compute(model: Model) -> None:
    peer = TransformersPeer(model, dtype="float32", threads=1)
    cache, token = peer.start(PROMPTS)
    rows = [token.tolist()]
    for _ in range(8):
        token = peer.step(cache, token)
        rows.append(token.tolist())
    async with TorchExecutor(model, dtype="float32", num_blocks=16, threads=1) as executor:
        host = Host(executor)
        for index, prompt in enumerate(PROMPTS):
            line = host.line(prompt)
            assert await host.generate(line, 9) == [row[index][0] for row in rows]
            host.close(line)


def test_a_round_leaves_nothing_for_the_next(model: Model) -> None:
    peer = TransformersPeer(model, dtype="float32", threads=1)
    firsts = []
    for _ in range(2):
        cache, token = peer.start(PROMPTS)
        firsts.append((cache.get_seq_length(), token.tolist()))
        assert peer.decode(PROMPTS, 5) > 0
        assert peer.prefill(PROMPTS[0]) > 0
    assert firsts[0] == firsts[1]
    assert firsts[0][0] == 12
