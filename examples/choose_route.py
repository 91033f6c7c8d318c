"""Two ways to share three replicas, tried on the same requests in virtual time: run `python choose_route.py`."""

from collections.abc import Sequence
from pathlib import Path

from deepinfra.bench.simulate import (
    LengthClass,
    PoolSetup,
    Setup,
    Summary,
    generated,
    page,
    replica_for,
    simulate,
    summaries,
)
from deepinfra.core.request import SeqSpec
from deepinfra.engine import PoolView, Route, least_loaded
from deepinfra.executors.simulated import SimulatedExecutor
from deepinfra.schedulers import Bucketed

REPLICA = replica_for("h100/llama-8b")  # what steps cost there, and how many blocks of KV fit
GOAL_S = 0.05  # chats should have their first token by then, 99 of 100


def one_for_long(spec: SeqSpec, views: Sequence[PoolView]) -> int:
    """Long prompts share the first replica, the others are for short ones."""
    if len(spec.tokens) > 4000:
        return 0
    return 1 + least_loaded(spec, views[1:])


def executor() -> SimulatedExecutor:
    return SimulatedExecutor(
        cost=REPLICA.cost,
        num_blocks=REPLICA.num_blocks,
        block_size=REPLICA.block_size,
        block_nbytes=REPLICA.block_nbytes,
    )


def setup(name: str, route: Route) -> Setup:
    pools = [PoolSetup(scheduler=Bucketed, executor=executor, replicas=3)]
    return Setup(name=name, pools=pools, route=route, devices=3 * REPLICA.devices)


def p99_s(summary: Summary, bucket: int) -> float:
    """99 % of a bucket's requests had their first token by then."""
    spread = summary.buckets[bucket].first_token_s
    assert spread is not None
    return spread.p99


def main() -> None:
    """Simulate both, write a report, and choose what keeps the goal and is best for documents."""
    chats = LengthClass(share=0.9, prompt=500, output=20)
    documents = LengthClass(share=0.1, prompt=20_000, output=20)
    requests = generated(120, per_s=6.0, classes=(chats, documents))
    results = [
        simulate(requests, setup("any replica", least_loaded)),
        simulate(requests, setup("one for long", one_for_long)),
    ]
    Path("report.html").write_text(page(results, price=2.5))

    found = summaries(results)
    for each in found:
        print(
            f"{each.name}: p99 of first tokens {p99_s(each, 0):.2f} s for chats, {p99_s(each, 2):.2f} s for documents"
        )
    good = [each for each in found if p99_s(each, 0) <= GOAL_S]
    print(f"chosen: {min(good, key=lambda each: p99_s(each, 2)).name if good else 'neither'}")


if __name__ == "__main__":
    main()
