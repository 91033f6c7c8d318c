from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfra.bench.simulate.plan.devices import DEVICES
from deepinfra.bench.simulate.plan.models import MODELS
from deepinfra.bench.simulate.plan.roofline import Layout, Part, Roofline
from deepinfra.core.cost import StepWork
from deepinfra.errors import ConfigError

ROOFLINES = (
    Roofline(DEVICES["h100"], MODELS["llama-8b"]),
    Roofline(DEVICES["h100"], MODELS["llama-70b"], Layout(width=8)),
    Roofline(DEVICES["gb200"], MODELS["deepseek-v4.1-flash"], Layout(width=64, spares=64)),
    Roofline(DEVICES["h800"], MODELS["deepseek-v3"], Layout(width=144, spares=32)),
)

works = st.builds(
    lambda chunk, start, rows, context, drafts: StepWork(0, 0.0, rows, rows * context, rows * drafts).chunk(
        start, chunk
    ),
    st.integers(0, 8192),
    st.integers(0, 100_000),
    st.integers(0, 256),
    st.integers(1, 100_000),
    st.integers(0, 5),
)


def decode(rows: int, context: int = 4096) -> StepWork:
    return StepWork(decode_rows=rows, decode_reads=float(rows * context))


def parts(roofline: Roofline, work: StepWork) -> dict[str, Part]:
    return {part.name: part for part in roofline.parts(work)}


@given(st.sampled_from(ROOFLINES), works, st.integers(1, 4096), st.integers(1, 64))
def test_more_work_never_takes_less_time(roofline: Roofline, work: StepWork, chunk: int, rows: int) -> None:
    before = roofline.seconds(work)
    drafts = work.drafts // work.decode_rows if work.decode_rows else 0
    more = work._replace(
        decode_rows=work.decode_rows + rows,
        decode_reads=work.decode_reads + rows * 1000.0,
        drafts=work.drafts + rows * drafts,
    )
    assert roofline.seconds(work.chunk(0, chunk)) >= before
    assert roofline.seconds(more) >= before


def test_one_sequence_waits_for_bytes_and_many_for_arithmetic() -> None:
    alone, many = (parts(ROOFLINES[0], decode(rows))["projections"] for rows in (1, 1024))
    assert alone.memory_s > alone.compute_s
    assert many.compute_s > many.memory_s


def test_a_step_takes_no_less_than_reading_the_weights() -> None:
    device, model = DEVICES["h100"], MODELS["llama-8b"]
    assert ROOFLINES[0].seconds(decode(1)) > model.dense_nbytes / device.memory_bytes_s


def test_a_dense_model_on_eight_devices_has_an_eighth_of_the_work_on_each() -> None:
    device, model = DEVICES["b200"], MODELS["llama-70b"]
    one, eight = (Roofline(device, model, Layout(width=width)) for width in (1, 8))
    for part, share in zip(one.parts(decode(16)), eight.parts(decode(16)), strict=True):
        assert share.seconds == pytest.approx(part.seconds / 8)
    assert one.communication(decode(16)) == 0.0 < eight.communication(decode(16))
    assert eight.weights_nbytes == pytest.approx(one.weights_nbytes / 8)


@pytest.mark.parametrize(("rows", "touched"), [(1, 6), (8, 45), (32, 152), (64, 244), (128, 333), (256, 377)])
def test_a_batch_reads_as_many_experts_as_random_routing_touches(rows: int, touched: int) -> None:
    """Counts of 384 experts by others (community inference profile of V4.1-Flash, 6.3)."""
    device, model = replace(DEVICES["gb300"], memory_nbytes=1e12), MODELS["deepseek-v4.1-flash"]
    part = parts(Roofline(device, model), decode(rows))["experts"]
    nbytes = part.memory_s * device.memory_bytes_s * 0.9
    assert nbytes / model.expert_layers / model.expert_nbytes == pytest.approx(touched, abs=0.5)


def test_the_fullest_device_has_more_than_its_share_of_a_small_batch() -> None:
    device, model = DEVICES["gb200"], MODELS["deepseek-v4.1-flash"]
    roofline = Roofline(device, model, Layout(width=64))

    def each(rows: int) -> float:
        return parts(roofline, decode(rows))["experts"].compute_s / rows

    assert each(4) > 1.2 * each(4096)


def test_a_group_beyond_its_domain_is_as_slow_as_the_network() -> None:
    near, far = (Roofline(DEVICES["h200"], MODELS["deepseek-v4.1-flash"], Layout(width=width)) for width in (8, 16))
    assert far.communication(decode(64)) > near.communication(decode(64))


@pytest.mark.parametrize(("width", "us"), [(32, 155 + 273), (64, 173 + 314), (128, 192 + 369)])
def test_experts_of_other_nodes_are_about_as_far_as_deepep_measured(width: int, us: float) -> None:
    """DeepEP docs/legacy.md: low-latency dispatch and combine of 128 rows of 7168, 8 experts each, at 400 Gb/s."""
    model = MODELS["deepseek-v3"]
    seconds = Roofline(DEVICES["h800"], model, Layout(width=width)).communication(decode(128)) / model.expert_layers
    assert seconds == pytest.approx(us * 1e-6, rel=0.15)


def test_communication_counts_only_beyond_everything_else() -> None:
    roofline = ROOFLINES[3]
    work = StepWork().chunk(0, 8192)
    inside = sum(part.seconds for part in roofline.parts(work))
    assert roofline.communication(work) > inside
    assert roofline.seconds(work) == pytest.approx(roofline.communication(work) + roofline.latency(work))


def test_kv_and_weights_fill_nine_tenths_of_memory() -> None:
    roofline = ROOFLINES[0]
    context = 4096
    used = roofline.weights_nbytes + roofline.sequences(context) * context * roofline.model.stored_nbytes
    assert 0.9 * 80e9 - context * roofline.model.stored_nbytes < used <= 0.9 * 80e9


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout\.width: llama-70b has 73 GB of weights per device on 1 x h100"):
        Roofline(DEVICES["h100"], MODELS["llama-70b"])


def test_devices_without_a_way_to_each_other_make_no_group() -> None:
    with pytest.raises(ConfigError, match=r"device\.network_bytes_s: laptop has none, for a layout of 2 devices"):
        Roofline(DEVICES["laptop"], MODELS["llama-8b"], Layout(width=2))
