"""Which runs are a session's own, and what a release of it takes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from vllm_ctx_offload.core.order import Run

__all__ = ["Session", "Sessions"]


class Session(Struct, gc=False, eq=False):
    """What requests of one session have stored and nobody else has used."""

    key: tuple[str, ...]
    num_runs: int = 0  # released ones too
    # The ids of the runs that its next release takes. It takes them as a whole: they
    # stay together, and the session begins another batch.
    batch: dict[int, None] = {}


class Sessions:
    """The sessions that have runs, and those runs that releases have yet to reach."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, ...], Session] = {}
        self.releasing: deque[dict[int, None]] = deque()

    def get(self, key: tuple[str, ...]) -> Session:
        """Returns the session of a key; `close` it when it may have no chunks."""
        if (session := self.by_key.get(key)) is None:
            session = self.by_key[key] = Session(key)
        return session

    def close(self, session: Session) -> None:
        """Forgets a session that has no runs."""
        if not session.num_runs:
            self.by_key.pop(session.key, None)

    def join(self, run: Run) -> None:
        """Counts a new run as its session's, if it is of one."""
        if (session := run.session) is None:
            return
        if run.batch is None:
            run.batch = session.batch
        run.batch[run.run_id] = None
        session.num_runs += 1
        # It was closed if the use that made this run emptied the last one.
        self.by_key[session.key] = session

    def leave(self, run: Run) -> None:
        """Has to be told of a run that is gone."""
        if run.session is not None:
            if run.batch is not None:
                del run.batch[run.run_id]
            run.session.num_runs -= 1
            self.close(run.session)

    def release(self, session: Session) -> None:
        """Has `next_released` give out the session's own runs, after those before."""
        if session.batch:
            self.releasing.append(session.batch)
            session.batch = {}
        self.close(session)

    def next_released(self) -> int | None:
        """Returns the id of a released run, each once; None: there is none left."""
        while self.releasing and not self.releasing[0]:
            self.releasing.popleft()  # all were used or evicted since
        return self.releasing[0].popitem()[0] if self.releasing else None

    def check_invariants(self, runs: Iterable[Run]) -> None:
        """Raises AssertionError unless sessions and runs agree about each other."""
        runs = list(runs)
        sessions = Counter(run.session for run in runs if run.session is not None)
        assert sessions == {s: s.num_runs for s in self.by_key.values()}
        batches = [*self.releasing, *(session.batch for session in sessions)]
        assert {run_id for batch in batches for run_id in batch} == {
            run.run_id for run in runs if run.batch is not None
        }
