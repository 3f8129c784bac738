"""ReqContext: what one request says about its KV cache, parsed once.

A client controls every byte that is read here, so nothing in this module raises on
what it finds: a bad field is dropped on its own and named in `ReqContext.rejected`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from vllm_ctx_offload.config import (
    DEFAULT_PRIORITY,
    DEFAULT_TENANT,
    WILDCARD_TENANT,
    OffloadConfig,
    TenantConfig,
)

__all__ = [
    "DEFAULT_PRIORITY",
    "EMPTY_HINTS",
    "Hints",
    "RejectedHint",
    "ReqContext",
    "RetentionDirective",
    "build_req_context",
]

MAX_NAME_LENGTH: Final = 128
# A directive costs time at every store; a client gets this many.
MAX_DIRECTIVES: Final = 64

_T = TypeVar("_T")
_Names = tuple[str, ...]


class RejectedHint(NamedTuple):
    """A field that was ignored or clamped. Both values come from a small fixed set."""

    field: str
    reason: str


class RetentionDirective(NamedTuple):
    """Retention of the half-open token range [start, end)."""

    start: int
    end: int | None  # None: to the end of the request
    priority: int
    duration_s: float | None  # None: for good, which only priorities up to 35 are


@dataclass(frozen=True, slots=True)
class Hints:
    """The validated fields of `kv_transfer_params`, clamped to the tenant's caps."""

    session: str | None = None
    priority: int = DEFAULT_PRIORITY  # 0 to 100, higher is kept longer
    # How long `priority` and `decode_priority` hold; None: for good, if not raised.
    ttl_s: float | None = None
    retention_directives: tuple[RetentionDirective, ...] = ()
    decode_priority: int | None = None  # of chunks past the prompt
    expected_reuse_s: float | None = None  # estimate of the session's return
    store: bool = True
    load: bool = True
    release: bool = False
    receipt: bool = False
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None


EMPTY_HINTS: Final = Hints()


@dataclass(frozen=True, slots=True)
class ReqContext:
    """The context of one request, handed to every method of the manager.

    Built once, when the scheduler first sees the request.
    """

    request_id: str
    # As the client sent it; read only through `hints`.
    kv_transfer_params: Mapping[str, Any] | None = None
    tenant: str = DEFAULT_TENANT  # a declared name or `default`
    # Keys of different namespaces never hit each other; empty: the shared one.
    namespace: bytes = b""
    hints: Hints = EMPTY_HINTS
    # Of chunks about which nothing is said, which a priority of 35 does not either.
    base_priority: int = DEFAULT_PRIORITY
    num_prompt_tokens: int | None = None  # as far as it is known
    rejected: tuple[RejectedHint, ...] = field(default=(), compare=False)

    @property
    def granted_priority(self) -> int:
        asked = self.hints.priority
        return self.base_priority if asked == DEFAULT_PRIORITY else asked


class _Invalid(Exception):  # noqa: N818 - a signal, not an error
    """A value that its parser refuses; never leaves this module."""


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise _Invalid("type")
    if not 1 <= len(value) <= MAX_NAME_LENGTH:
        raise _Invalid("length")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Invalid("type")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Invalid("type")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of a float
        number = math.inf if value > 0 else -math.inf
    if math.isnan(number):
        raise _Invalid("not_a_number")
    return number


def _priority(value: object) -> int:
    # Just outside the range stands for all beyond it until `_Parser.clamp` counts it.
    return int(min(max(_number(value), -1), 101))


def _seconds(value: object) -> float:
    number = _number(value)
    if number < 0:
        raise _Invalid("negative")
    return number


def _positive_seconds(value: object) -> float:
    number = _seconds(value)
    if number == 0:
        raise _Invalid("not_positive")
    return number


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Invalid("type")
    if value < 0:
        raise _Invalid("negative")
    return value


def _directive(value: object) -> RetentionDirective:
    if not isinstance(value, Mapping):
        raise _Invalid("type")
    start = _count(value.get("start", 0))
    raw_end, raw_duration = value.get("end"), value.get("duration")
    end = None if raw_end is None else _count(raw_end)
    if end is not None and end <= start:
        raise _Invalid("empty_range")
    duration_s = None if raw_duration is None else _positive_seconds(raw_duration)
    return RetentionDirective(start, end, _priority(value.get("priority")), duration_s)


_FIELDS: Final[dict[str, Callable[[object], Any]]] = {
    "session": _name,
    "priority": _priority,
    "ttl_s": _positive_seconds,
    "decode_priority": _priority,
    "expected_reuse_s": _seconds,
    "store": _flag,
    "load": _flag,
    "release": _flag,
    "receipt": _flag,
}
_KNOWN: Final[_Names] = ("tenant", "retention_directives", *_FIELDS)
_IN_DIRECTIVES: Final[_Names] = ("start", "end", "priority", "duration")
_PRIORITIES: Final = ("priority", "decode_priority")
_CAPS: Final = ("max_load_tokens", "max_offload_tokens")


class _Parser:
    """Reads one request's fields and remembers what it had to refuse."""

    def __init__(self) -> None:
        self.rejected: list[RejectedHint] = []

    def read(
        self, name: str, parse: Callable[[object], _T], value: object
    ) -> _T | None:
        try:
            return parse(value)
        except _Invalid as invalid:
            self.rejected.append(RejectedHint(name, str(invalid)))
            return None

    def mapping(self, name: str, value: object) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.rejected.append(RejectedHint(name, "type"))
            return {}
        return value

    def only_known(self, name: str, raw: Mapping[str, Any], known: _Names) -> None:
        # Once, without their names: neither labels nor work grow with what is sent.
        if len(raw) > sum(field in raw for field in known):
            self.rejected.append(RejectedHint(name, "unknown_field"))

    def directives(self, value: object) -> tuple[RetentionDirective, ...]:
        name = "retention_directives"
        if not isinstance(value, list | tuple):
            self.rejected.append(RejectedHint(name, "type"))
            return ()
        if len(value) > MAX_DIRECTIVES:
            self.rejected.append(RejectedHint(name, "too_many"))
        given = value[:MAX_DIRECTIVES]
        for item in given:
            if isinstance(item, Mapping):
                self.only_known(name, item, _IN_DIRECTIVES)
        parsed = (self.read(name, _directive, item) for item in given)
        return tuple(directive for directive in parsed if directive is not None)

    def clamp(self, name: str, value: Any, most: float) -> Any:
        if value is None or 0 <= value <= most:
            return value
        self.rejected.append(RejectedHint(name, "clamped"))
        return type(value)(min(max(value, 0), most))


def build_req_context(  # noqa: PLR0913 - each is one fact of the request
    config: OffloadConfig,
    request_id: str,
    kv_transfer_params: Mapping[str, Any] | None,
    *,
    cache_salt: str | None = None,
    lora_name: str | None = None,
    session_id: str | None = None,
    num_prompt_tokens: int | None = None,
) -> ReqContext:
    """Returns the context of a request; accepts anything and never raises.

    Args:
        config: the engine's configuration; names the tenants and their caps.
        request_id: vLLM's id of the request.
        kv_transfer_params: as sent by the client, of any content.
        cache_salt: the request's salt, one possible source of the tenant's name.
        lora_name: the request's LoRA adapter, another one.
        session_id: vLLM's own session id, the fallback of `ctx.session`.
        num_prompt_tokens: where the prompt ends, for `ctx.decode_priority`.
    """
    parser = _Parser()
    params = parser.mapping("kv_transfer_params", kv_transfer_params)
    raw = parser.mapping("ctx", params.get("ctx"))
    sources = {
        "kv_transfer_params": raw.get("tenant"),
        "cache_salt": cache_salt,
        "lora": lora_name,
    }
    tenant, account, namespace = _route(config, parser, sources)
    hints = _parse_hints(parser, params, raw, session_id, account)
    return ReqContext(
        request_id=request_id,
        kv_transfer_params=kv_transfer_params,
        tenant=tenant,
        namespace=namespace,
        hints=hints,
        base_priority=config.tenant(tenant).base_priority,
        num_prompt_tokens=num_prompt_tokens,
        rejected=tuple(parser.rejected),
    )


def _route(
    config: OffloadConfig, parser: _Parser, sources: Mapping[str, object]
) -> tuple[str, TenantConfig, bytes]:
    """Returns (tenant to account to, what holds for it, namespace of its keys)."""
    named: str | None = None
    for source in config.tenant_from:
        value = sources[source]
        if value is not None and (named := parser.read("tenant", _name, value)):
            break
    # "*" is no tenant: a request that names it is as undeclared as any other.
    declared = named in config.tenants and named != WILDCARD_TENANT
    tenant = named if named and declared else DEFAULT_TENANT
    account = config.tenant(named or DEFAULT_TENANT)
    if account.isolation == "shared":
        return tenant, account, b""
    # An undeclared name under a private "*" still gets a namespace of its own: it is
    # accounted to `default`, but must not read another customer's cache.
    namespace = (named or DEFAULT_TENANT).encode("utf-8", "surrogatepass")
    return tenant, account, namespace


def _parse_hints(
    parser: _Parser,
    params: Mapping[str, Any],
    raw: Mapping[str, Any],
    session_id: str | None,
    tenant: TenantConfig,
) -> Hints:
    """Returns the accepted fields, clamped to what `tenant` may ask for."""
    values: dict[str, Any] = {}
    for name, parse in _FIELDS.items():
        if (value := raw.get(name)) is not None:  # null is the same as absent
            values[name] = parser.read(name, parse, value)
    if (value := raw.get("retention_directives")) is not None:
        values["retention_directives"] = _clamped_directives(
            parser, parser.directives(value), tenant
        )
    parser.only_known("unknown", raw, _KNOWN)
    for name in _CAPS:
        if (value := params.get(name)) is not None:
            values[name] = parser.read(name, _count, value)
    if values.get("session") is None and session_id is not None:
        values["session"] = parser.read("session", _name, session_id)

    for name in _PRIORITIES:
        values[name] = parser.clamp(name, values.get(name), tenant.max_priority)
    values["ttl_s"] = parser.clamp("ttl_s", values.get("ttl_s"), tenant.max_ttl_s)
    if values["ttl_s"] is None and _is_raised(values):
        values["ttl_s"] = tenant.max_ttl_s  # nothing is protected for good
    values["store"] = tenant.store and values.get("store") is not False
    values["load"] = tenant.load and values.get("load") is not False
    return Hints(**{name: value for name, value in values.items() if value is not None})


def _is_raised(values: Mapping[str, Any]) -> bool:
    return any((values.get(name) or 0) > DEFAULT_PRIORITY for name in _PRIORITIES)


def _clamped_directives(
    parser: _Parser, directives: tuple[RetentionDirective, ...], tenant: TenantConfig
) -> tuple[RetentionDirective, ...]:
    name = "retention_directives"
    clamped = []
    for directive in directives:
        priority = parser.clamp(name, directive.priority, tenant.max_priority)
        duration_s = parser.clamp(name, directive.duration_s, tenant.max_ttl_s)
        if duration_s is None and priority > DEFAULT_PRIORITY:
            duration_s = tenant.max_ttl_s  # nothing is protected for good
        clamped.append(directive._replace(priority=priority, duration_s=duration_s))
    return tuple(clamped)
