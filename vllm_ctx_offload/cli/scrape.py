"""What a /metrics page says of offloading, added up over the engines."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_ctx_offload.adapters.catalogue import CONNECTOR_LABEL, PREFIX
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.text import printable

__all__ = ["PoolFigures", "TenantFigures", "fetch", "metrics_url", "parse_page"]

_TIMEOUT_S: Final = 10.0
_MAX_PAGE_BYTES: Final = 64 * 1024**2


@dataclass(slots=True)
class TenantFigures:
    """Counters since the start of the engines, and gauges."""

    resident_bytes: float = 0
    reserved_bytes: float = 0
    limit_bytes: float = 0
    lookup_tokens: float = 0
    hit_tokens: float = 0
    stored_bytes: float = 0
    loaded_bytes: float = 0
    evicted_by: Counter[str] = field(default_factory=Counter)  # chunks
    rejected_stores: Counter[str] = field(default_factory=Counter)  # by reason


@dataclass(slots=True)
class PoolFigures:
    """One connector of every engine: its pool and its tenants."""

    capacity_bytes: float = 0
    pinned_bytes: float = 0
    protected_bytes: float = 0
    disabled: float = 0  # engines in which it is
    transfer_failures: float = 0
    engines: set[str] = field(default_factory=set)
    tenants: dict[str, TenantFigures] = field(default_factory=dict)


_OF_TENANT: Final = frozenset(TenantFigures.__dataclass_fields__)
_OF_POOL: Final = frozenset(PoolFigures.__dataclass_fields__)


def metrics_url(address: str) -> str:
    """Returns the address of a /metrics page; scheme and path may be left out.

    Raises:
        ConfigError: it is no address on the web.
    """
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port  # raises for what is none
    except ValueError:
        parts, port = urllib.parse.urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(
            f"'{address}' is no address of a server; give one such as "
            "http://localhost:8000/metrics."
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"


def fetch(url: str) -> str:
    """Returns the text of a page; the address is one that `metrics_url` returned.

    Raises:
        ConfigError: it can't be read.
    """
    headers = {"Accept": "text/plain"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - see above
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            page: bytes = response.read(_MAX_PAGE_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            reason = f"HTTP {error.code} {error.reason}"
        raise ConfigError(
            f"{url} can't be read ({reason}); give the address of a running vLLM "
            "server, as its clients reach it."
        ) from None
    return page.decode(errors="replace")


def parse_page(text: str) -> dict[str, PoolFigures]:
    """Returns the figures by connector: "0", and more in a MultiConnector.

    Before the first request there are none: vLLM says what metrics there will be.

    Raises:
        ConfigError: the page knows none of ours, or can't be parsed.
    """
    pools: dict[str, PoolFigures] = {}
    for sample in _samples(text):
        # Whoever serves the page named these: they go to a terminal.
        labels = {name: printable(value) for name, value in sample.labels.items()}
        pool = pools.setdefault(labels.get(CONNECTOR_LABEL, "0"), PoolFigures())
        pool.engines.add(labels.get("engine", "0"))
        _add(pool, sample.name.removeprefix(PREFIX), labels, sample.value)
    if PREFIX not in text:
        raise ConfigError(
            f"the page knows no metrics named {PREFIX}..., so this server does not run "
            "CtxOffloadConnector, or runs with --disable-log-stats; with "
            "--api-server-count above 1 they come only with the first request."
        )
    return pools


def _samples(text: str) -> Iterable[Any]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ConfigError(
            "top needs prometheus_client, which vLLM brings; here install it by "
            "pip install prometheus_client."
        ) from None
    # The format ends lines by this one character; labels may hold all others.
    ours = "".join(f"{line}\n" for line in text.split("\n") if PREFIX in line)
    try:
        families = [*text_string_to_metric_families(ours)]
    except ValueError as error:
        raise ConfigError(f"the page is no page of metrics ({error}).") from None
    return [sample for family in families for sample in family.samples]


def _add(pool: PoolFigures, name: str, labels: dict[str, str], value: float) -> None:
    name = name.removesuffix("_total")
    if (tenant_name := labels.get("tenant")) is None:
        if name in _OF_POOL:
            setattr(pool, name, getattr(pool, name) + value)
        return
    tenant = pool.tenants.setdefault(tenant_name, TenantFigures())
    if name == "evicted_chunks":
        tenant.evicted_by[labels.get("by", "")] += int(value)
    elif name == "rejected_stores":
        tenant.rejected_stores[labels.get("reason", "")] += int(value)
    elif name in _OF_TENANT:
        setattr(tenant, name, getattr(tenant, name) + value)
