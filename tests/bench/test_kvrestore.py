from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from deepinfra.bench.kvrestore import RestoreRun, run_restore
from deepinfra.bench.recorder import Recorder
from deepinfra.core.kv import KVRecord
from deepinfra.errors import EngineError
from deepinfra.executors.toy import ToyExecutor
from deepinfra.kvstores import SsdStore
from deepinfra.schedulers.fcfs import Fcfs
from deepinfra.testing.tiny import TinyRecipe

RUN = RestoreRun(prefix=200, batch=2, new=12, repeat=2)


def recorder() -> Recorder:
    return Recorder(ToyExecutor(num_blocks=256, max_context=512))


async def test_a_prefix_is_restored_from_the_disk_after_a_restart(tmp_path: Path) -> None:
    report = await run_restore(TinyRecipe(), Fcfs(), recorder(), RUN, model="toy", path=tmp_path)
    assert [figure.name for figure in report.figures] == ["cold", "warm"]
    assert all(len(figure.restored_s) == len(figure.computed_s) == RUN.repeat for figure in report.figures)
    assert report.saved >= RUN.repeat * RUN.batch * (RUN.prefix // 8) // recorder().layout.block_size
    assert all(gap.saving_s > 0 < gap.idle_s for gap in report.gaps)
    assert list(tmp_path.iterdir()) == []


async def test_a_prefix_that_is_not_restored_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def save(self: SsdStore, records: Sequence[KVRecord]) -> None:
        pass

    monkeypatch.setattr(SsdStore, "save", save)
    with pytest.raises(EngineError, match="0 tokens of 200 were restored"):
        await run_restore(TinyRecipe(), Fcfs(), recorder(), RUN, model="toy", path=tmp_path)
