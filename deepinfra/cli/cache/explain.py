"""`deepinfra cache explain`: why a prompt is not found in the cache."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import anyio
import typer

from deepinfra.cli.cache.folder import (
    AsJson,
    PathOption,
    Place,
    advancing,
    census_of,
    now,
    place_of,
    time_text,
    visible,
)
from deepinfra.cli.prompts import ApiOption, RecipeName, prompt_of, requests_of
from deepinfra.cli.setup import Config, blueprint_for, fetch_models
from deepinfra.errors import ConfigError, InvalidJsonError

if TYPE_CHECKING:
    from deepinfra.cli.cache.held import Asker, Twin
    from deepinfra.config import Blueprint
    from deepinfra.core.conversation import JsonValue
    from deepinfra.core.request import GenerateRequest, SeqSpec
    from deepinfra.engine import Pool
    from deepinfra.engine.explain import Explanation
    from deepinfra.interfaces import Recipe

__all__ = ("explain",)

_TWINS = 3


class _Explained(NamedTuple):
    explanation: Explanation
    asker: Asker
    twins: list[Twin]


def explain(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Catalogue name, path, or hub id; - is the configured.")
    ],
    request: Annotated[str, typer.Argument(metavar="REQUEST.json", help="A request's body; - reads standard input.")],
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose request it is.")] = "public",
    api: ApiOption = None,
    recipe_name: RecipeName = None,
    path: PathOption = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Say which blocks of a prompt are in the folder of the store, and why the next one is not.

    Looks at the disk alone, where it also sees expired records and those of other tenants; a server may run meanwhile.
    What a server holds in RAM and on its device only the server knows: send it the request with the header
    `x-deepinfra-explain: 1`. The request may be of any of the APIs. Use the configuration that the server has, since
    its model, template, element type and block size decide what is found. Exits 1 if there is nothing to look into.

    Example: deepinfra cache explain smollm2 request.json --tenant team-a
    """
    raw = _one_object(sys.stdin.buffer.read() if request == "-" else Path(request).read_bytes())
    asked = requests_of(raw, api)
    keywords: dict[str, object] = {
        "model": None if model == "-" else model,
        "recipe": None if recipe_name is None else {"use": recipe_name},
    }
    blueprint = blueprint_for(config, keywords)
    place = place_of(path, blueprint)
    fetch_models(blueprint)
    for explained in anyio.run(_explain, blueprint, place, asked, tenant):
        if as_json:
            typer.echo(json.dumps(_document(place, explained), ensure_ascii=False))
        else:
            _print(place, explained)


def _one_object(data: bytes) -> dict[str, JsonValue]:
    from deepinfra.api.body import parse_object

    try:
        return parse_object(data)
    except InvalidJsonError:
        first, _, rest = data.strip().partition(b"\n")
        if rest:
            with suppress(InvalidJsonError):
                parse_object(first)
                raise ConfigError(
                    "`cache explain` takes one request, and these are several, one a line: give it one of them, as in"
                    " `head -n 1 REQUESTS.jsonl | deepinfra cache explain MODEL -`"
                ) from None
        raise


async def _explain(blueprint: Blueprint, place: Place, asked: list[GenerateRequest], tenant: str) -> list[_Explained]:
    from deepinfra.cli.cache.held import Held
    from deepinfra.engine.explain import explanation_of
    from deepinfra.engine.public import PublicPrefixes

    pool = blueprint.without_stores().pools[0].build()
    recipe = blueprint.recipe.build()
    census = census_of(place.path)
    held = Held(place.path, census, now())
    found: list[_Explained] = []
    async with recipe:
        public = PublicPrefixes(blueprint.public_prefixes, recipe, recipe.offload)
        for request in asked:
            ids = prompt_of(recipe, request.input).ids
            date = getattr(request.input, "now", None)
            spec = _spec(ids, tenant, request.salt, await public.shared(ids, date))
            asker = _asker(pool, recipe, spec)
            with advancing(f"{place.path}: reading", len(asker.keys) * asker.layout.block_nbytes) as advance:
                miss = held.miss(asker, advance)
            explanation = explanation_of(miss, ids, recipe)
            twins = [twin for twin in held.twins(asker) if twin.tokens > explanation.held_tokens]
            found.append(_Explained(explanation, asker, twins))
    return found


def _spec(ids: tuple[int, ...], tenant: str, salt: str, public: int) -> SeqSpec:
    from deepinfra.core.ids import SeqId
    from deepinfra.core.request import SeqSpec

    length = len(ids)
    return SeqSpec(
        seq=SeqId(0), tokens=ids, prompt_len=length, max_tokens=1, seed=0, tenant=tenant, salt=salt, public=public
    )


def _asker(pool: Pool, recipe: Recipe, spec: SeqSpec) -> Asker:
    """The keys that a server of this configuration looks for."""
    from deepinfra.cli.cache.held import Asker
    from deepinfra.core.kv import parent_key
    from deepinfra.engine.sources import Kin, namespace_of
    from deepinfra.engine.windows import window_plan

    executor = pool.executor
    namespace = namespace_of(executor, recipe.version, spec.tenant, spec.salt, pool.replay)
    root, public, keys = Kin.of(executor, recipe.version, pool.replay).chain(spec)
    parents = [parent_key(root, keys, index, public) for index in range(len(keys) + 1)]
    windows = window_plan(executor.layout, pool.replay)
    return Asker(namespace, executor.layout, windows, executor.identity.model, spec.tokens, keys, parents)


def _document(place: Place, explained: _Explained) -> dict[str, object]:
    from deepinfra.api.protocol import explanation_json
    from deepinfra.core.kv import root_key

    return {
        "path": str(place.path),
        "tenant": explained.asker.namespace.tenant,
        "namespace": root_key(explained.asker.namespace).hex(),
        **explanation_json(explained.explanation),
        "elsewhere": [
            {
                "tenant": twin.owner.tenant,
                "model": twin.owner.model,
                "namespace": twin.owner.namespace.hex(),
                "tokens": twin.tokens,
                "age_s": round(twin.age_s, 3),
                "differs": twin.differs,
            }
            for twin in explained.twins
        ],
    }


def _print(place: Place, explained: _Explained) -> None:
    from deepinfra.core.kv import root_key

    explanation, asker, twins = explained
    namespace = asker.namespace
    lines = [
        ("folder", str(place.path)),
        ("asked", f"{explanation.prompt_tokens} tokens in blocks of {explanation.block_size}, model {asker.model}"),
        ("whose", f"tenant {namespace.tenant}, namespace {root_key(namespace).hex()[:12]}"),
    ]
    tiers = ", ".join(
        f"{hit.count} blocks in {hit.tier}, the oldest saved {time_text(hit.age_s)} ago" for hit in explanation.tiers
    )
    lines += [
        ("held", f"{explanation.held_tokens} tokens: {tiers}" if tiers else "nothing"),
        (explanation.why, explanation.words),
    ]
    if (differs := explanation.differs) is not None:
        lines += [
            ("  both", visible(f"…{differs.before}")),
            ("  asked", visible(differs.asked)),
            ("  held", visible(differs.held)),
        ]
    for twin in twins[:_TWINS]:
        whose = f"tenant {visible(twin.owner.tenant)} with {visible(twin.owner.model)}"
        words = f"{twin.tokens} of these tokens are held for {whose}"
        lines.append(("elsewhere", f"{words}, saved {time_text(twin.age_s)} ago: {twin.differs}"))
    for name, text in lines:
        typer.echo(f"{name:11}  {text}")
