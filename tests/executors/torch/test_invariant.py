"""`batch_invariant`: what it says of itself, and what it refuses by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deepinfra_kernels import build, cpu

from deepinfra.errors import ConfigError
from deepinfra.executors.torch import TorchExecutor
from deepinfra.executors.torch.config import decoder_config


def test_it_is_promised_only_when_asked_for(smollm2_path: Any) -> None:
    ordinary = TorchExecutor(str(smollm2_path))
    invariant = TorchExecutor(str(smollm2_path), batch_invariant=True)
    assert "batch-invariant" not in ordinary.provides
    assert invariant.provides == ordinary.provides | {"batch-invariant"}
    assert ordinary.explain()["numerics"] == "ordinary stored"


def test_kv_of_another_mode_path_or_form_never_mixes(smollm2_path: Any) -> None:
    choices = [(path, weights) for path in cpu.paths() for weights in ("stored", "dense")]
    executors = [
        TorchExecutor(str(smollm2_path), batch_invariant=True, kernels=path, weights=weights)  # type: ignore[arg-type]
        for path, weights in choices
    ]
    numerics = [executor.explain()["numerics"] for executor in executors]
    assert len({"ordinary stored", "ordinary dense", *numerics}) == len(choices) + 2
    for (path, weights), text in zip(choices, numerics, strict=True):
        assert text.startswith(f"batch-invariant {path} {weights} {build.fingerprint(path)} ")


def test_invariant_kv_of_other_angles_never_mixes(smollm2_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's numpy may round a base to a power otherwise."""
    before = TorchExecutor(str(smollm2_path), batch_invariant=True)

    def nudged(config: Any) -> Any:
        made = decoder_config(config)
        rope = replace(made.rope, inv_freq=np.nextafter(made.rope.inv_freq, np.float32(2)))
        return replace(made, rope=rope)

    monkeypatch.setattr("deepinfra.executors.torch.executor.decoder_config", nudged)
    after = TorchExecutor(str(smollm2_path), batch_invariant=True)
    assert before.explain()["numerics"] != after.explain()["numerics"]
    assert TorchExecutor(str(smollm2_path)).explain()["numerics"] == "ordinary stored"


def test_the_identity_names_the_mode(smollm2_path: Any) -> None:
    executor = TorchExecutor(str(smollm2_path), batch_invariant=True)
    assert executor.identity.numerics == executor.explain()["numerics"]


def test_torch_is_refused_by_name(smollm2_path: Any) -> None:
    with pytest.raises(ConfigError, match="batch_invariant cannot be kept with kernels = torch: sums of torch depend"):
        TorchExecutor(str(smollm2_path), batch_invariant=True, kernels="torch")


def test_a_model_that_torch_computes_is_refused_with_the_reason(made: Any) -> None:
    for family, reason in (("gemma3", "windows"), ("gpt-oss", "experts"), ("llama", "heads of size 8")):
        with pytest.raises(ConfigError, match=rf"batch_invariant cannot be kept: .* torch computes here: .*{reason}"):
            TorchExecutor(str(made(family)[0]), batch_invariant=True)


async def test_kernels_that_cannot_be_built_are_refused_and_nothing_takes_their_place(
    smollm2_path: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho broken 1; exit $#\n")
    broken.chmod(0o755)
    monkeypatch.setattr("deepinfra_kernels.build._COMPILERS", (str(broken),))
    monkeypatch.setattr("deepinfra.executors.torch.library.kernel_cache_dir", lambda: tmp_path / "kernels")
    executor = TorchExecutor(str(smollm2_path), batch_invariant=True, num_blocks=4)
    best = cpu.paths()[0]
    with pytest.raises(ConfigError, match=f"batch_invariant cannot be kept: the {best} kernels cannot be built"):
        async with executor:
            pass
