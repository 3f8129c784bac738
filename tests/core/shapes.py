"""Shapes of pools, and of calls on them, of any size: what a search for costs tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from manager_probe import FakeClock, make_manager

from vllm_ctx_offload.context import Hints, ReqContext, RetentionDirective
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager

VARIED = -1  # another value for each request


@dataclass(frozen=True)
class Asked:
    """The hints of requests, by the number of each."""

    session: str | None = None  # "one" for all, or "each" its own
    priority: int = 35  # or VARIED
    ttl_s: int | None = None  # or VARIED
    expected_reuse_s: int | None = None  # or VARIED
    alternating: bool = False  # a directive for every other chunk
    release: bool = False

    def hints(self, number: int) -> Hints:
        directives = tuple(
            RetentionDirective(start, start + 1, 60, 600.0)
            for start in range(0, 16 if self.alternating else 0, 2)
        )
        sessions = {None: None, "one": "s", "each": f"s{number}"}
        return Hints(
            session=sessions[self.session],
            priority=number % 101 if self.priority == VARIED else self.priority,
            ttl_s=_varied(self.ttl_s, number),
            expected_reuse_s=_varied(self.expected_reuse_s, number),
            retention_directives=directives,
            release=self.release,
        )


def _varied(seconds: int | None, number: int) -> float | None:
    return 1.0 + number if seconds == VARIED else seconds


@dataclass(frozen=True)
class Call:
    """A call of a method of the manager."""

    method: str
    num_keys: int = 1
    oldest: bool = True  # which chains it is about, where it is about any
    tenant: int = 0
    asked: Asked = Asked()


@dataclass(frozen=True)
class Shape:
    """What a pool was filled with, and what is called then, one after the other."""

    asked: tuple[Asked, ...] = (Asked(),)  # of the requests in turn
    chain_length: int = 1
    tenants: str = "one"  # "few", or "many": one for every eight chunks
    budget: float = 0.0  # of the pool
    filled: float = 1.0
    in_use: str | None = None  # every chain is being loaded, or stored
    removed: int = 0  # so many of each four chains are removed in the end
    seconds: int = 0  # that pass then
    plain_lru: bool = False
    calls: tuple[Call, ...] = (Call("store"),)

    def play(self, size: int) -> Iterator[tuple[Call, int, Callable[[], object]]]:
        """Fills a pool of `size` chunks; yields the calls, to be made by the caller.

        With each goes for how many things it may cost: its keys, and for a choice of
        victims what is pinned.
        """
        pool = _Pool(self, size)
        pool.fill()
        for number, call in enumerate(self.calls):
            context = pool.context(call.tenant, call.asked, 10**6 + number)
            for keys, run in getattr(pool, f"call_{call.method}")(call, context):
                yield call, len(keys) + pool.manager.num_pinned, run


class _Pool:
    def __init__(self, shape: Shape, size: int) -> None:
        self.shape, self.clock = shape, FakeClock()
        num_tenants = {"one": 0, "few": 3, "many": size // 8}[shape.tenants]
        self.tenants = ["default", *(f"tenant{n}" for n in range(num_tenants))]
        self.manager: HostMemoryManager = make_manager(
            size,
            accounts=dict.fromkeys(self.tenants, AccountTerms()),
            max_protected=int(size * shape.budget),
            plain_lru=shape.plain_lru,
            clock=self.clock,
        )
        self.num_chains = int(size * shape.filled) // shape.chain_length
        self._new = itertools.count()

    def context(self, tenant: int, asked: Asked, number: int) -> ReqContext:
        tenant_name = self.tenants[tenant % len(self.tenants)]
        return ReqContext(str(number), tenant=tenant_name, hints=asked.hints(number))

    def chain(self, number: int) -> list[bytes]:
        length = self.shape.chain_length
        return [b"%d" % key for key in range(number * length, (number + 1) * length)]

    def fill(self) -> None:
        shape, manager = self.shape, self.manager
        chains = [self.chain(number) for number in range(self.num_chains)]
        for number, chain in enumerate(chains):
            self.clock.now += 1e-4
            context = self.context(
                number, shape.asked[number % len(shape.asked)], number
            )
            grant = manager.prepare_store(chain, context)
            if shape.in_use != "stored":
                manager.complete_store([chain[n] for n in grant.indices], context)
            if shape.in_use == "loaded":
                found = manager.lookup(chain, context).num_ready
                manager.prepare_load(chain[:found], context)
            if context.hints.release:
                manager.on_request_finished(context)
        for number, chain in enumerate(chains):
            if number % 4 < shape.removed:
                manager.remove(chain, context)
        self.clock.now += shape.seconds

    def old_keys(self, call: Call) -> list[bytes]:
        num_chains = -(-call.num_keys // self.shape.chain_length)
        numbers = range(self.num_chains)
        numbers = numbers[:num_chains] if call.oldest else numbers[-num_chains:]
        keys = [key for number in numbers for key in self.chain(number)]
        return keys[: call.num_keys]

    def call_store(self, call: Call, context: ReqContext) -> Iterator[Any]:
        keys = [b"new%d" % next(self._new) for _ in range(call.num_keys)]
        yield from self._store(keys, context, success=True)

    def call_store_more(self, call: Call, context: ReqContext) -> Iterator[Any]:
        """Of a chain whose head is in the pool; the copy fails."""
        new = [b"new%d" % next(self._new) for _ in range(call.num_keys)]
        yield from self._store([*self.old_keys(call), *new], context, success=False)

    def _store(
        self, keys: list[bytes], context: ReqContext, *, success: bool
    ) -> Iterator[Any]:
        grants: list[Any] = []
        manager = self.manager
        yield keys, lambda: grants.append(manager.prepare_store(keys, context))
        granted = [keys[index] for index in grants[0].indices]
        yield granted, lambda: manager.complete_store(granted, context, success)

    def call_lookup(self, call: Call, context: ReqContext) -> Iterator[Any]:
        keys = self.old_keys(call)
        yield keys, lambda: self.manager.lookup(keys, context)

    def call_touch(self, call: Call, context: ReqContext) -> Iterator[Any]:
        keys = self.old_keys(call)
        yield keys, lambda: self.manager.touch(keys, context)

    def call_load(self, call: Call, context: ReqContext) -> Iterator[Any]:
        keys = self.old_keys(call)
        keys = keys[: self.manager.lookup(keys, context).num_ready]
        yield keys, lambda: self.manager.prepare_load(keys, context)
        yield keys, lambda: self.manager.complete_load(keys, context)

    def call_remove(self, call: Call, context: ReqContext) -> Iterator[Any]:
        keys = self.old_keys(call)
        yield keys, lambda: self.manager.remove(keys, context)

    def call_begin(self, call: Call, context: ReqContext) -> Iterator[Any]:
        yield [], lambda: self.manager.on_new_request(context)

    def call_finish(self, call: Call, context: ReqContext) -> Iterator[Any]:
        yield [], lambda: self.manager.on_request_finished(context)

    def call_release(self, call: Call, context: ReqContext) -> Iterator[Any]:
        """Of the session that all are in, if they are in one."""
        for tenant in dict.fromkeys((context.tenant, "default")):
            hints = Hints(session="s", release=True)
            ending = ReqContext("ending", tenant=tenant, hints=hints)
            yield [], lambda c=ending: self.manager.on_request_finished(c)

    def call_figures(self, call: Call, context: ReqContext) -> Iterator[Any]:
        """What is asked for every step; the first time, it may be new to the asker."""
        self.manager.take_changed()
        self.manager.touch([], context)
        yield [], self._figures

    def _figures(self) -> object:
        manager = self.manager
        figures = (manager.num_resident, manager.num_pinned, manager.num_protected)
        return figures, manager.take_changed()

    def call_reset(self, call: Call, context: ReqContext) -> Iterator[Any]:
        """Costs by what there is of accounts and pins, and nothing else."""
        yield self.tenants, self.manager.reset


ASKED = st.builds(
    Asked,
    session=st.sampled_from([None, "one", "each"]),
    priority=st.sampled_from([35, 10, 90, VARIED]),
    ttl_s=st.sampled_from([None, 5, VARIED]),
    expected_reuse_s=st.sampled_from([None, 5, 500, VARIED]),
    alternating=st.booleans(),
    release=st.booleans(),
)
METHODS = [name.removeprefix("call_") for name in vars(_Pool) if "call_" in name]
CALLS = st.builds(
    Call,
    method=st.sampled_from(METHODS),
    num_keys=st.sampled_from([1, 4, 12]),
    oldest=st.booleans(),
    tenant=st.integers(0, 2),
    asked=ASKED,
)
SHAPES = st.builds(
    Shape,
    asked=st.lists(ASKED, min_size=1, max_size=2).map(tuple),
    chain_length=st.sampled_from([1, 1, 1, 8]),
    tenants=st.sampled_from(["one", "few", "many"]),
    budget=st.sampled_from([0.0, 0.5, 1.0]),
    filled=st.sampled_from([1.0, 1.0, 0.5]),
    in_use=st.sampled_from([None, None, "loaded", "stored"]),
    removed=st.sampled_from([0, 0, 3, 4]),
    seconds=st.sampled_from([0, 10, 100_000]),
    plain_lru=st.sampled_from([False, False, False, True]),
    calls=st.lists(CALLS, min_size=1, max_size=4).map(tuple),
)
