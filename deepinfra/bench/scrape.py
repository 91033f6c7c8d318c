"""What a server's `/metrics` say, and what happened between two looks at them."""

from __future__ import annotations

import errno
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from deepinfra.errors import ConfigError, EngineError

__all__ = ("Between", "Scrape", "parsed", "read")

_TIMEOUT_S = 10.0


class Scrape(NamedTuple):
    """One look: values by name and labels, `at` seconds of some clock."""

    at: float
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def labels(self, name: str, label: str, **wanted: str) -> list[str]:
        """Values of a label of those that have the wanted others, in the order of the server."""
        found = [dict(labels) for known, labels in self.values if known == name]
        return list(dict.fromkeys(each[label] for each in found if label in each and wanted.items() <= each.items()))

    def sum(self, name: str, **wanted: str) -> float | None:
        """Of all with these labels; `None` if there is none."""
        at = frozenset(wanted.items())
        found = [value for (known, labels), value in self.values.items() if known == name and at <= labels]
        return sum(found) if found else None


def read(url: str, at: float, *, api_key: str | None = None) -> Scrape:
    """Look once; blocks.

    Raises:
        ConfigError: The URL is none.
        OSError: Nobody listens there.
        EngineError: What answers is not this server.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an address like http://127.0.0.1:8000")
    request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + "/metrics", headers={"accept": "text/plain"})
    if api_key:
        request.add_header("authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        raise EngineError(f"{request.full_url}: status {error.code}") from None
    except urllib.error.URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else OSError()
        why = f"{reason.strerror or 'cannot connect'}: {url}; is a server running there?"
        raise OSError(reason.errno or errno.ECONNREFUSED, why) from None
    except http.client.HTTPException as error:
        raise EngineError(f"{request.full_url} does not speak HTTP: {type(error).__name__}") from None
    try:
        return parsed(text, at)
    except ValueError as error:
        raise EngineError(f"{request.full_url} are no metrics: {error}") from None


def parsed(text: str, at: float) -> Scrape:
    """What `/metrics` said at some time.

    Raises:
        ValueError: It is something else.
    """
    from prometheus_client.parser import text_string_to_metric_families as parse

    samples = [sample for family in parse(text) for sample in family.samples]
    return Scrape(at, {(s.name.removeprefix("deepinfra_"), frozenset(s.labels.items())): s.value for s in samples})


class Between:
    """Two looks at one server, the second at least as late.

    A server that was started again in between counts from its new beginning.
    """

    def __init__(self, first: Scrape | None, last: Scrape) -> None:
        self.last = last
        steps = first.sum("steps_total") if first is not None else None
        self._first = None if (steps or 0.0) > (last.sum("steps_total") or 0.0) else first

    def now(self, name: str, **labels: str) -> float | None:
        """A value as it is."""
        return self.last.sum(name, **labels)

    def grown(self, name: str, **labels: str) -> float | None:
        """By how much a counter has grown."""
        last = self.last.sum(name, **labels)
        before = self._first.sum(name, **labels) if self._first is not None else None
        return None if last is None else last - (before or 0.0)

    def per_s(self, name: str, **labels: str) -> float | None:
        """And per second; `None` of a single look."""
        grown = self.grown(name, **labels)
        elapsed_s = self.last.at - self._first.at if self._first is not None else 0.0
        return None if grown is None or elapsed_s <= 0.0 else grown / elapsed_s

    def share(self, part: float | None, whole: float | None) -> float | None:
        """One of the other, if that is anything."""
        return None if part is None or not whole else part / whole

    def quantiles(self, name: str, shares: Iterable[float], **labels: str) -> list[float | None]:
        """Of a histogram's values, those between the looks or, if there were none, all; within a bucket evenly spread.

        `inf` is beyond the last bound.
        """
        bounds = sorted(map(float, self.last.labels(f"{name}_bucket", "le", **labels)))
        texts = {float(text): text for text in self.last.labels(f"{name}_bucket", "le", **labels)}
        below = [self.grown(f"{name}_bucket", le=texts[bound], **labels) or 0.0 for bound in bounds]
        if not below or not below[-1]:
            below = [self.now(f"{name}_bucket", le=texts[bound], **labels) or 0.0 for bound in bounds]
        return [_quantile(bounds, below, share) for share in shares]


def _quantile(bounds: list[float], below: list[float], share: float) -> float | None:
    if not below or not below[-1]:
        return None
    wanted = share * below[-1]
    index = next(i for i, count in enumerate(below) if count >= wanted)
    least, before = (bounds[index - 1], below[index - 1]) if index else (0.0, 0.0)
    if bounds[index] == float("inf"):
        return bounds[index]
    return least + (bounds[index] - least) * (wanted - before) / max(1.0, below[index] - before)
