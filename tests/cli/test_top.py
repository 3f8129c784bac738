"""`vllm-ctx-offload top`, from the text of a page to what is printed."""

from __future__ import annotations

import functools
import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from rich.console import Console

from vllm_ctx_offload.adapters.metrics import MetricClasses, PrometheusMetrics
from vllm_ctx_offload.cli import main, top
from vllm_ctx_offload.cli.scrape import PoolFigures, fetch, metrics_url, parse_page
from vllm_ctx_offload.cli.top import Snapshot, Surroundings, as_json, draw, watch
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.stats import OffloadStats, of_connector

MIB = 1024**2


class Page:
    """A /metrics page as vLLM's API server makes it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        kinds: tuple[Any, ...] = (Counter, Gauge, Histogram)
        classes = (functools.partial(kind, registry=self._registry) for kind in kinds)
        self._metrics = PrometheusMetrics(
            MetricClasses(*classes),
            ["model_name", "engine"],
            {0: ["llama", "0"], 1: ["llama", "1"]},
        )
        Counter("vllm:prompt_tokens", "vLLM's own.", registry=self._registry)
        self.stats = OffloadStats()

    def text(self, engine: int = 0, connector: int = 0) -> str:
        figures = of_connector(connector, self.stats.take())
        self._metrics.observe(figures, engine)
        return generate_latest(self._registry).decode()


@pytest.fixture
def page() -> Page:
    page = Page()
    stats = page.stats
    stats.set("capacity_bytes", to=64 * MIB)
    stats.set("pinned_bytes", to=MIB)
    stats.set("protected_bytes", to=0)
    stats.set("disabled", to=0)
    stats.declare("transfer_failures", "load")
    stats.declare("transfer_seconds", "load")
    for name, resident in (("acme", 8 * MIB), ("zeta", 40 * MIB)):
        stats.set("resident_bytes", name, to=resident)
        stats.set("reserved_bytes", name, to=16 * MIB)
        stats.set("limit_bytes", name, to=64 * MIB)
        stats.count("lookup_tokens", name, by=1000)
        stats.count("hit_tokens", name, by=250)
        stats.count("loaded_bytes", name, by=2 * MIB)
        stats.count("stored_bytes", name, by=4 * MIB)
    for by, count in (("acme", 5), ("zeta", 9), ("b", 2), ("c", 1), ("d", 1)):
        stats.count("evicted_chunks", "zeta", by, by=count)
    stats.count("rejected_stores", "acme", "full", by=3)
    return page


def shown(snapshot: Snapshot, width: int = 150) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(draw(snapshot))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_page_becomes_figures_per_tenant(page: Page) -> None:
    (pool,) = parse_page(page.text()).values()
    assert pool.capacity_bytes == 64 * MIB
    assert pool.engines == {"0"}
    assert [*pool.tenants] == ["acme", "zeta"]
    zeta = pool.tenants["zeta"]
    assert (zeta.resident_bytes, zeta.reserved_bytes) == (40 * MIB, 16 * MIB)
    assert zeta.evicted_by == {"acme": 5, "zeta": 9, "b": 2, "c": 1, "d": 1}
    assert pool.tenants["acme"].rejected_stores == {"full": 3}


def test_engines_are_added_up_and_connectors_stay_apart(page: Page) -> None:
    page.text()
    page.stats.set("capacity_bytes", to=MIB)
    page.stats.count("hit_tokens", "acme", by=7)
    page.text(engine=1)
    page.stats.count("hit_tokens", "acme", by=100)
    pools = parse_page(page.text(engine=0, connector=1))
    assert pools["0"].tenants["acme"].hit_tokens == 257
    # A gauge is taken when it has changed: the second engine's is the new one.
    assert pools["0"].capacity_bytes == 65 * MIB
    assert pools["0"].engines == {"0", "1"}
    assert pools["1"].tenants["acme"].hit_tokens == 100
    text = shown(Snapshot(pools, {}, 0.0))
    assert "connector 0, pool" in text
    assert "connector 1, pool" in text
    assert "2 engine(s)" in text


def test_the_table_has_who_holds_most_first_and_rates_of_the_interval(
    page: Page,
) -> None:
    before = parse_page(page.text())
    page.stats.count("loaded_bytes", "zeta", by=6 * MIB)
    page.stats.count("lookup_tokens", "zeta", by=100)
    page.stats.count("hit_tokens", "zeta", by=90)
    page.stats.count("transfer_failures", "load", by=2)
    page.stats.set("disabled", to=1)
    lines = shown(Snapshot(parse_page(page.text()), before, 2.0)).splitlines()
    assert "pool 64.00 MiB, resident 48.00 MiB, pinned 1.00 MiB" in lines[0]
    assert "2 copies failed, disabled by an error in 1 engine(s)" in lines[0]
    zeta, acme = (line.split() for line in lines if line.startswith(("acme", "zeta")))
    evicted = ["zeta", "9,", "acme", "5,", "b", "2,", "others", "2"]
    assert zeta[:5] == ["zeta", "40.0M", "16.0M", "64.0M", "30.9%"]
    assert zeta[5:] == ["90.0%", *evicted, "-", "3.00M", "0"]
    assert acme[4:] == ["25.0%", "-", "-", "full", "3", "0", "0"]


def test_the_table_fits_a_terminal_of_80_columns(page: Page) -> None:
    before = parse_page(page.text())
    for name in ("lookup_tokens", "hit_tokens"):
        page.stats.count(name, "zeta", by=900)
    page.stats.count("loaded_bytes", "zeta", by=123 * MIB)
    page.stats.count("lookup_tokens", "zeta", by=1)
    snapshot = Snapshot(parse_page(page.text()), before, 2.0)
    lines = shown(snapshot, width=80).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    text = " ".join(" ".join(lines).split())
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for word in ("64.0M 60.5% 99.9%", "61.5M", "full 3", "store/s"):
        assert word in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "0.98K"),
        (1024**2, "1.00M"),
        (9.996 * 1024**3, "10.0G"),
        (99.96 * 1024**3, "100G"),
        (999.4 * 1024**3, "999G"),
        (1023 * 1024**3, "1.00T"),
        (5e6 * 1024**5, "5000000P"),
    ],
)
def test_sizes_have_three_digits(num_bytes: float, text: str) -> None:
    assert top._size(num_bytes) == text


def test_what_is_not_known_after_one_reading_is_a_dash_or_null(page: Page) -> None:
    snapshot = Snapshot(parse_page(page.text()), {}, 0.0)
    (pool,) = as_json(snapshot)["pools"]
    acme = pool["tenants"]["acme"]
    assert acme["hit_rate"] == 0.25
    assert acme["hit_rate_now"] is acme["load_bytes_per_s"] is None
    assert json.loads(json.dumps(pool)) == pool
    row = next(line for line in shown(snapshot).splitlines() if line.startswith("acme"))
    assert row.split()[-2:] == ["-", "-"]


def test_a_server_that_was_started_again_counts_from_zero() -> None:
    first, second = Page(), Page()
    for some_page, count in ((first, 100), (second, 30)):
        some_page.stats.count("loaded_bytes", "acme", by=count)
    before, after = (parse_page(p.text()) for p in (first, second))
    (pool,) = as_json(Snapshot(after, before, 10.0))["pools"]
    assert pool["tenants"]["acme"]["load_bytes_per_s"] == 3.0


def test_names_of_tenants_are_no_markup() -> None:
    page = Page()
    page.stats.set("resident_bytes", "[red]x[/]", to=1)
    assert "[red]x[/]" in shown(Snapshot(parse_page(page.text()), {}, 0.0))


class Script:
    """Pages in turn, and a clock that waiting moves."""

    def __init__(self, *pages: Callable[[], str]) -> None:
        self._pages = iter(pages)
        self.now = 100.0

    def fetch(self, url: str) -> str:
        assert url == "http://host:8000/metrics"
        return next(self._pages)()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(self.fetch, self.wait, lambda: self.now)


def unreachable() -> str:
    raise ConfigError("gone.")


def test_a_reading_that_fails_is_a_sentence_and_the_next_covers_its_time(
    page: Page,
) -> None:
    def more() -> str:
        page.stats.count("stored_bytes", "acme", by=12 * MIB)
        return page.text()

    script = Script(page.text, unreachable, more)
    readings = watch("host:8000", 3.0, script.surroundings)
    first, second, third = (next(readings) for _ in range(3))
    assert isinstance(first, Snapshot)
    assert first.seconds == 0
    assert second == "gone."
    assert isinstance(third, Snapshot)
    assert third.seconds == 6
    (pool,) = as_json(third)["pools"]
    assert pool["tenants"]["acme"]["store_bytes_per_s"] == 2 * MIB


def test_before_the_first_request_it_waits_and_says_so(page: Page) -> None:
    script = Script(Page().text, Page().text, page.text)
    readings = watch("host:8000", 3.0, script.surroundings)
    waiting = "no figures yet: they come with the server's first request."
    assert [next(readings), next(readings)] == [waiting, waiting]
    reading = next(readings)
    assert isinstance(reading, Snapshot)
    (pool,) = as_json(reading)["pools"]
    # All of it has happened since the reading before.
    assert pool["tenants"]["acme"]["store_bytes_per_s"] == 4 * MIB / 3


def test_once_before_the_first_request_ends_with_the_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(Page().text, Page().text)
    monkeypatch.setattr(top, "Surroundings", lambda: script.surroundings)
    assert main(["top", "host:8000", "--once"]) == 1
    assert capsys.readouterr().err.startswith("vllm-ctx-offload top: no figures yet")


def test_a_first_reading_that_fails_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"gone\."):
        next(watch("host:8000", 1.0, Script(unreachable).surroundings))


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("https://host/", "https://host/metrics"),
        ("http://host:1/behind/a/gateway", "http://host:1/behind/a/gateway"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_scheme_and_path_may_be_left_out(address: str, url: str) -> None:
    assert metrics_url(address) == url


@pytest.mark.parametrize("address", ["", "file:///etc/passwd", "host:port", "http://["])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address of a server; give one"):
        metrics_url(address)


def test_a_page_without_our_metrics_says_why_that_may_be() -> None:
    with pytest.raises(ConfigError, match="this server does not run CtxOffloadConn"):
        parse_page("# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens 1\n")


def test_a_page_that_is_garbled_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no page of metrics"):
        parse_page("vllm:ctx_offload_resident_bytes{tenant= what\n")


def test_figures_of_a_later_release_are_left_out() -> None:
    text = 'vllm:ctx_offload_new{tenant="a",x="y"} 1\nvllm:ctx_offload_newer 2\n'
    (pool,) = parse_page(text).values()
    assert pool.tenants.keys() == {"a"}
    assert pool == PoolFigures(engines={"0"}, tenants=pool.tenants)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers /metrics with the page, everything else with 404."""

    page: Page

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        body = self.page.text().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Keeps the test's output clean."""


@pytest.fixture
def server(page: Page) -> Iterator[str]:
    handler = type("PageHandler", (Handler,), {"page": page})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def test_once_prints_one_table_and_ends(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", server, "--once", "--interval", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("pool 64.00 MiB") == 1
    assert "zeta 9, acme 5" in out


def test_once_as_json_has_rates_of_one_interval(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", server, "--once", "--json", "--interval", "0.001"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["seconds"] > 0
    assert plain["pools"][0]["tenants"]["acme"]["load_bytes_per_s"] == 0


def test_errors_are_one_sentence_and_exit_code_1(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, wanted in {
        (f"{server}/else", "--once"): "HTTP 404 Not Found",
        ("127.0.0.1:1", "--once"): "can't be read",
        (server, "--interval", "0"): "is no time to wait",
        (server, "--interval", "nan"): "is no time to wait",
    }.items():
        assert main(["top", *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("vllm-ctx-offload top: ")
        assert wanted in err
        assert err.count("\n") == 1


def test_a_page_is_read_as_text(server: str) -> None:
    assert fetch(f"http://{server}/metrics").startswith("# HELP")


def test_live_as_json_is_a_line_for_each_reading_until_interrupted(
    page: Page, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(page.text, unreachable, page.text)

    def wait(seconds: float) -> None:
        script.wait(seconds)
        if script.now >= 106:
            raise KeyboardInterrupt

    surroundings = Surroundings(script.fetch, wait, lambda: script.now)
    monkeypatch.setattr(top, "Surroundings", lambda: surroundings)
    assert main(["top", "host:8000", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("error") for line in lines] == [None, "gone.", None]


@pytest.mark.parametrize("terminal", [True, False])
def test_live_draws_until_interrupted_and_keeps_the_last_table(
    page: Page,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)

    def interrupt() -> str:
        raise KeyboardInterrupt

    script = Script(page.text, unreachable, interrupt)
    monkeypatch.setattr(top, "Surroundings", lambda: script.surroundings)
    assert main(["top", "host:8000"]) == 0
    out = capsys.readouterr().out
    assert "pool 64.00 MiB" in out
    assert "gone." in out


def test_live_into_a_pipe_is_a_table_for_each_reading_at_once(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log or `tee` shows it while it runs, not when it ends."""
    written: list[int] = []
    out = io.StringIO()

    def interrupt_after_two(seconds: float) -> None:
        written.append(out.getvalue().count("pool 64.00 MiB"))
        if len(written) == 2:
            raise KeyboardInterrupt

    surroundings = Surroundings(
        lambda url: page.text(), interrupt_after_two, lambda: 0.0
    )
    monkeypatch.setattr(top, "Surroundings", lambda: surroundings)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["top", "host:8000"]) == 0
    assert written == [1, 2]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_goes_away_ends_it_without_a_traceback(
    server: str, more: list[str]
) -> None:
    program = "import sys; from vllm_ctx_offload.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "top", server, "--interval", "0.01"]
    with subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1
