"""`/metrics`: an engine's own counters in Prometheus' words, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from deepinfra.core.kv import KVStats, TierStats
from deepinfra.core.step import TenantStats
from deepinfra.engine import Engine
from deepinfra.engine.stats import EngineStats, HistogramSnapshot, PoolStats

__all__ = ("EngineCollector", "registry")

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_STATES = ("stopped", "starting", "ready", "draining", "failed")

_ENGINE_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token, per answer.", "ttft"),
    ("inter_token_seconds", "Between two tokens of an answer.", "itl"),
    ("queue_wait_seconds", "From arrival to the first step, per answer.", "queue_wait"),
    ("loop_lag_seconds", "How late the event loop ran a timer.", "loop_lag"),
)

_POOL_COUNTERS = (
    ("steps", "Steps of the executor.", "steps"),
    ("steps_ahead", "Steps submitted before the result of the one before was there.", "steps_ahead"),
    ("preemptions", "Running sequences that lost their blocks.", "preemptions"),
    ("executor_losses", "Times the executor was lost.", "executor_losses"),
    ("saves_dropped", "Blocks not saved to the store because there was no room to wait.", "saves_dropped"),
    ("records_damaged", "Records of the store that did not pass the engine's check.", "records_damaged"),
    ("drafts_verified", "Draft tokens verified.", "drafts_verified"),
    ("drafts_accepted", "Draft tokens accepted.", "drafts_accepted"),
    ("overhead_seconds", "Wall time of steps outside the executor.", "overhead_seconds"),
    ("step_failures", "Steps that failed.", "step_failures"),
    ("rows_replayed", "Rows computed again behind a cached prefix, for sliding windows' sake.", "rows_replayed"),
    ("hits_too_short", "Cached prefixes that saved nothing, because windows had to be rebuilt.", "hits_too_short"),
    ("snapshots_taken", "Snapshots of sliding windows taken.", "snapshots_taken"),
    ("snapshots_dropped", "Snapshots wanted and not taken, or not kept.", "snapshots_dropped"),
    ("snapshots_restored", "Sequences that began behind a snapshot.", "snapshots_restored"),
)

_POOL_GAUGES = (
    ("saves_waiting", "Blocks waiting to be saved to the store.", "saves_waiting"),
    ("staging_slots", "Host staging slots.", "slots_total"),
    ("staging_slots_free", "Host staging slots in nobody's hands.", "slots_free"),
    ("least_prefix_tokens", "Smallest cached prefix that saves computing without a snapshot.", "least_prefix"),
)

_STORE_COUNTERS = ("hits", "misses", "saved", "dropped", "damaged", "evicted", "expired", "renewed")

_TIER_COUNTERS = (
    ("failures", "Calls of a tier that raised or took too long.", "failures"),
    ("dropped", "Records that a tier never got, because too many waited or it failed.", "dropped"),
    ("filtered", "Records that a tier was not given because of its admission filter.", "filtered"),
)

_TIER_GAUGES = (
    ("up", "1 unless a tier is passed by because it failed.", "up"),
    ("waiting", "Records that wait to be written to a tier.", "waiting"),
    ("waiting_bytes", "Bytes of these.", "waiting_nbytes"),
)

_SCHEDULER_COUNTERS = (("steps_learned", "Steps from which the scheduler learned how long steps take.", "learned"),)

_SCHEDULER_GAUGES = (
    ("backlog_tokens", "Prompt tokens without cache of sequences that wait.", "backlog_tokens"),
    ("backlog_seconds", "Predicted seconds that computing these takes.", "backlog_s"),
    ("overtakes_bound", "How often a waiting sequence that has room may be passed.", "max_overtakes"),
    ("wait_steps_bound", "Steps after which a waiting sequence that has room is first.", "max_wait_steps"),
)

_BUCKET_COUNTERS = (
    ("bucket_opened", "Sequences opened, by the uncached tokens from which their bucket begins.", "opened"),
    ("bucket_overtaken", "How often waiting sequences of a bucket were passed.", "overtaken"),
    ("bucket_tokens", "Prompt tokens of a bucket computed.", "tokens"),
    ("bucket_predicted_seconds", "Seconds that these were predicted to take.", "predicted_s"),
)

_BUCKET_GAUGES = (
    ("bucket_waiting", "Sequences of a bucket that wait.", "waiting"),
    ("bucket_waiting_tokens", "Prompt tokens without cache of these.", "waiting_tokens"),
    ("bucket_oldest_seconds", "How long the one waits that has waited longest.", "oldest_s"),
    ("bucket_overtaken_most", "How often the one was passed that was passed most often.", "overtaken_most"),
)

_TENANT_COUNTERS = (
    ("tenant_opened", "Sequences opened, by tenant; `*` are those not told one by one.", "opened"),
    ("tenant_refused", "Sequences of a tenant not admitted.", "refused"),
    ("tenant_shed", "Waiting sequences of a tenant ended so that others had room.", "shed"),
    ("tenant_served_seconds", "Predicted seconds of work of a tenant's sequences that were opened.", "served_s"),
)

_TENANT_GAUGES = (
    ("tenant_waiting", "Sequences of a tenant that wait.", "waiting"),
    ("tenant_waiting_tokens", "Prompt tokens without cache of these.", "waiting_tokens"),
    ("tenant_running", "Sequences of a tenant that run.", "running"),
)


class EngineCollector(Collector):
    """Turns `Engine.stats()` into metric families, one label `model` per engine, one `pool` where pools differ.

    Tenants are told by name if so wanted, all together as `*` if not.
    """

    def __init__(self, engines: Mapping[str, Engine], *, tenants: bool) -> None:
        self._engines, self._tenants = engines, tenants

    def collect(self) -> Iterator[Family]:
        """See prometheus_client."""
        stats = {model: engine.stats() for model, engine in self._engines.items()}
        yield from _engines(stats)
        pools = [(model, pool) for model, engine in stats.items() for pool in engine.pools]
        yield from _pools(pools)
        yield from _stores(pools)
        yield from _tiers(pools)
        yield from _schedulers(pools, by_name=self._tenants)


def registry(engines: Mapping[str, Engine], *, tenants: bool = False) -> CollectorRegistry:
    """A registry of its own, so that several applications live in one process."""
    own = CollectorRegistry(auto_describe=False)
    own.register(EngineCollector(engines, tenants=tenants))
    return own


def _engines(stats: Mapping[str, EngineStats]) -> Iterator[Family]:
    state = GaugeMetricFamily("deepinfra_engine_state", "1 for the state an engine is in.", labels=("model", "state"))
    requests = CounterMetricFamily(
        "deepinfra_answers", "Answers that ended, by finish reason or error code.", labels=("model", "reason")
    )
    cached = CounterMetricFamily(
        "deepinfra_cached_tokens", "Prompt tokens not computed, by the tier they came from.", labels=("model", "tier")
    )
    prompt = CounterMetricFamily("deepinfra_prompt_tokens", "Tokens of prompts.", labels=("model",))
    generated = CounterMetricFamily("deepinfra_generated_tokens", "Tokens generated.", labels=("model",))
    for model, engine in stats.items():
        for name in _STATES:
            state.add_metric((model, name), float(name == engine.state))
        for reason, count in engine.requests.items():
            requests.add_metric((model, reason), count)
        for tier, tokens in engine.cached_tokens.items():
            cached.add_metric((model, tier), tokens)
        prompt.add_metric((model,), engine.prompt_tokens)
        generated.add_metric((model,), engine.generated_tokens)
    yield from (state, requests, cached, prompt, generated)
    for name, text, field in _ENGINE_HISTOGRAMS:
        histogram = HistogramMetricFamily(f"deepinfra_{name}", text, labels=("model",))
        for model, engine in stats.items():
            _add_histogram(histogram, (model,), getattr(engine, field))
        yield histogram


def _pools(pools: Iterable[tuple[str, PoolStats]]) -> Iterator[Family]:
    labels = ("model", "pool")
    pools = list(pools)
    sequences = GaugeMetricFamily("deepinfra_sequences", "Sequences, by what they do.", labels=(*labels, "state"))
    blocks = GaugeMetricFamily(
        "deepinfra_blocks", "Device blocks; free ones may hold cached prefixes.", labels=(*labels, "state")
    )
    seconds = HistogramMetricFamily("deepinfra_step_seconds", "Time inside the executor per step.", labels=labels)
    gaps = HistogramMetricFamily(
        "deepinfra_step_gap_seconds",
        "From a step's result to the next one's submission while there was work; 0 if that was submitted before.",
        labels=labels,
    )
    for model, pool in pools:
        sequences.add_metric((model, pool.name, "waiting"), pool.waiting)
        sequences.add_metric((model, pool.name, "running"), pool.running)
        blocks.add_metric((model, pool.name, "total"), pool.blocks_total)
        blocks.add_metric((model, pool.name, "free"), pool.blocks_free)
        blocks.add_metric((model, pool.name, "cached"), pool.blocks_cached)
        _add_histogram(seconds, (model, pool.name), pool.step_seconds)
        _add_histogram(gaps, (model, pool.name), pool.step_gap_seconds)
    yield from (sequences, blocks, seconds, gaps)
    for name, text, field in _POOL_COUNTERS:
        counter = CounterMetricFamily(f"deepinfra_{name}", text, labels=labels)
        for model, pool in pools:
            counter.add_metric((model, pool.name), getattr(pool, field))
        yield counter
    for name, text, field in _POOL_GAUGES:
        gauge = GaugeMetricFamily(f"deepinfra_{name}", text, labels=labels)
        for model, pool in pools:
            gauge.add_metric((model, pool.name), getattr(pool, field))
        yield gauge


def _stores(pools: Iterable[tuple[str, PoolStats]]) -> Iterator[Family]:
    """Stores as their pools see them; of a tiered one, all tiers together."""
    stores = [((model, pool.name), pool.store) for model, pool in pools if pool.store is not None]
    yield from _held("store", "a store", ("model", "pool"), stores)


def _tiers(pools: Iterable[tuple[str, PoolStats]]) -> Iterator[Family]:
    """Each tier of a tiered store; another store is its own one tier."""
    labels = ("model", "pool", "tier")
    tiers = [
        ((model, pool.name, tier.name), tier)
        for model, pool in pools
        if pool.store is not None
        for tier in (pool.store.tiers or (TierStats(name="+".join(pool.store.by_tier), up=True, held=pool.store),))
    ]
    yield from _held("tier", "a tier", labels, [(values, tier.held) for values, tier in tiers])
    for name, text, field in _TIER_COUNTERS:
        counter = CounterMetricFamily(f"deepinfra_tier_{name}", text, labels=labels)
        for values, tier in tiers:
            counter.add_metric(values, getattr(tier, field))
        yield counter
    for name, text, field in _TIER_GAUGES:
        gauge = GaugeMetricFamily(f"deepinfra_tier_{name}", text, labels=labels)
        for values, tier in tiers:
            gauge.add_metric(values, float(getattr(tier, field)))
        yield gauge


def _held(
    kind: str, what: str, labels: tuple[str, ...], stores: Iterable[tuple[tuple[str, ...], KVStats]]
) -> Iterator[Family]:
    held = GaugeMetricFamily(f"deepinfra_{kind}_bytes", f"Bytes {what} holds and may hold.", labels=(*labels, "what"))
    records = GaugeMetricFamily(f"deepinfra_{kind}_records", f"Records {what} holds.", labels=labels)
    events = CounterMetricFamily(
        f"deepinfra_{kind}_events", f"Records of {what}, by what became of them.", labels=(*labels, "event")
    )
    written = CounterMetricFamily(
        f"deepinfra_{kind}_written_bytes",
        f"Bytes that {what} wrote when it first saved records, and in all.",
        labels=(*labels, "what"),
    )
    amplification = GaugeMetricFamily(
        f"deepinfra_{kind}_write_amplification", f"Bytes that {what} wrote per byte first saved.", labels=labels
    )
    processes = GaugeMetricFamily(
        f"deepinfra_{kind}_processes", f"Processes that use what {what} keeps, this one included.", labels=labels
    )
    erasures = CounterMetricFamily(
        f"deepinfra_{kind}_erasures", f"Times that {what} forgot something, for whichever process.", labels=labels
    )
    for values, stats in stores:
        processes.add_metric(values, stats.processes)
        erasures.add_metric(values, stats.erasures)
        held.add_metric((*values, "used"), stats.nbytes)
        held.add_metric((*values, "capacity"), stats.capacity_nbytes)
        records.add_metric(values, stats.records)
        for event in _STORE_COUNTERS:
            events.add_metric((*values, event), getattr(stats, event))
        written.add_metric((*values, "saved"), stats.saved_nbytes)
        written.add_metric((*values, "all"), stats.written_nbytes)
        amplification.add_metric(values, stats.write_amplification)
    yield from (held, records, events, written, amplification, processes, erasures)


def _schedulers(pools: Iterable[tuple[str, PoolStats]], *, by_name: bool) -> Iterator[Family]:
    labels = ("model", "pool")
    found = [((model, pool.name), pool.scheduler) for model, pool in pools]
    yield from _families(labels, found, _SCHEDULER_COUNTERS, _SCHEDULER_GAUGES)
    error = GaugeMetricFamily(
        "deepinfra_step_prediction_error",
        "Relative error of the latest predicted step times, as median and 95th percentile.",
        labels=(*labels, "quantile"),
    )
    refused = CounterMetricFamily(
        "deepinfra_refused",
        "Sequences not admitted, by whose limit they met: the `server`'s or their `tenant`'s own.",
        labels=(*labels, "limit"),
    )
    shed = CounterMetricFamily(
        "deepinfra_shed",
        "Waiting sequences ended, by why: others had to get in (`overload`), or it was too late (`deadline`).",
        labels=(*labels, "reason"),
    )
    seconds = CounterMetricFamily(
        "deepinfra_aimed_step_seconds",
        "Seconds of steps with prompts that had an aim: what they were allowed (`budget`), predicted and measured.",
        labels=(*labels, "what"),
    )
    for values, stats in found:
        for quantile, value in (("0.5", stats.error_median), ("0.95", stats.error_p95)):
            if value is not None:
                error.add_metric((*values, quantile), value)
        refused.add_metric((*values, "server"), stats.refused - stats.refused_by_tenant)
        refused.add_metric((*values, "tenant"), stats.refused_by_tenant)
        shed.add_metric((*values, "overload"), stats.shed)
        shed.add_metric((*values, "deadline"), stats.expired)
        told = (("budget", stats.budget_s), ("predicted", stats.predicted_s), ("measured", stats.measured_s))
        for what, sum_s in told:
            seconds.add_metric((*values, what), sum_s)
    yield from (error, refused, shed, seconds)
    buckets = [((*values, str(bucket.least)), bucket) for values, stats in found for bucket in stats.buckets]
    yield from _families((*labels, "bucket"), buckets, _BUCKET_COUNTERS, _BUCKET_GAUGES)
    tenants = [
        ((*values, tenant.tenant), tenant)
        for values, stats in found
        for tenant in (stats.tenants if by_name else (_together(stats.tenants),))
    ]
    yield from _families((*labels, "tenant"), tenants, _TENANT_COUNTERS, _TENANT_GAUGES)


def _together(tenants: Iterable[TenantStats]) -> TenantStats:
    sums = [sum(numbers) for numbers in zip(*(tenant[1:] for tenant in tenants), strict=True)]
    return TenantStats("*", *sums)


def _families(
    labels: tuple[str, ...],
    found: Sequence[tuple[tuple[str, ...], NamedTuple]],
    counters: Iterable[tuple[str, str, str]],
    gauges: Iterable[tuple[str, str, str]],
) -> Iterator[Family]:
    """One family per (name, text, field); a field that is `None` is left out."""
    for kind, described in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, text, field in described:
            family = kind(f"deepinfra_{name}", text, labels=labels)
            for values, stats in found:
                value = getattr(stats, field)
                if value is not None:
                    family.add_metric(values, value)
            yield family


def _add_histogram(family: HistogramMetricFamily, labels: tuple[str, ...], snapshot: HistogramSnapshot) -> None:
    """Prometheus' buckets are cumulative, ours are not."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*map(str, snapshot.bounds), "+Inf"), snapshot.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    family.add_metric(labels, buckets, snapshot.total)
