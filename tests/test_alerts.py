"""Each alert fires on what it is about, and on nothing that looks like it.

Prometheus' own `promtool` decides, where it is installed (Debian: the package
`prometheus`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

RULES = Path(__file__).resolve().parents[1] / "deploy" / "prometheus-rules.yaml"
PROMTOOL = shutil.which("promtool")
OURS = 'model_name="m", engine="0", connector="0"'


class Case(NamedTuple):
    # Name and own labels of a series -> its value in each minute, as promtool has it.
    series: Mapping[str, str]
    firing: Mapping[int, str]  # minute -> the alert; "": none


def case(firing: Mapping[int, str], **series: str) -> Case:
    """Makes a case of series whose own labels are named in the values, before a |."""
    named = {}
    for name, written in series.items():
        labels, _, values = written.rpartition("|")
        named[f"vllm:ctx_offload_{name}{{{labels}{labels and ', '}{OURS}}}"] = values
    return Case(named, firing)


CASES = {
    "an engine disabled itself": case(
        {5: "", 15: "CtxOffloadDisabled"}, disabled="0x10 1x20"
    ),
    "a copy failed": case(
        {15: "", 25: "CtxOffloadTransfersFail", 45: ""},
        transfer_failures_total='direction="load" | 0x20 1x30',
    ),
    "released chunks went": case(
        {10: "", 30: ""},
        evicted_chunks_total='tenant="acme", by="zeta" | 0+5x40',
        resident_bytes='tenant="acme" | 80x40',
        reserved_bytes='tenant="acme" | 100x40',
    ),
    "a reservation was broken": case(
        {15: "", 25: "CtxOffloadReservationBroken"},
        reservation_breaches_total='tenant="acme" | _x20 3x20',
    ),
    "much is pinned, for a while": case(
        {12: "", 20: "CtxOffloadPoolPinned"},
        pinned_bytes="10x10 95x30",
        capacity_bytes="100x40",
    ),
    "half is pinned": case({20: ""}, pinned_bytes="50x40", capacity_bytes="100x40"),
    "stores find no place": case(
        {30: "", 60: "CtxOffloadStoresFindNoPlace"},
        rejected_stores_total='tenant="acme", reason="full" | 0x20 1+1x60',
    ),
    "stores are worth less": case(
        {60: ""}, rejected_stores_total='tenant="acme", reason="priority" | 0+9x80'
    ),
    "hardly a hit": case(
        {60: "", 200: "CtxOffloadHitRateLow"},
        lookup_tokens_total='tenant="acme" | 0+60000x300',
        hit_tokens_total='tenant="acme" | 0+600x300',
        stored_bytes_total='tenant="acme" | 0+120000000x300',
    ),
    "many hits": case(
        {200: ""},
        lookup_tokens_total='tenant="acme" | 0+60000x300',
        hit_tokens_total='tenant="acme" | 0+30000x300',
        stored_bytes_total='tenant="acme" | 0+120000000x300',
    ),
    "loads are slow": Case(
        {
            f'vllm:ctx_offload_load_seconds_bucket{{le="{le}", {OURS}}}': f"0+{step}x60"
            for le, step in (("1.0", 50), ("5.0", 100), ("+Inf", 100))
        },
        {10: "", 40: "CtxOffloadLoadsSlow"},
    ),
    "loads are fast": Case(
        {
            f'vllm:ctx_offload_load_seconds_bucket{{le="{le}", {OURS}}}': "0+100x60"
            for le in ("1.0", "5.0", "+Inf")
        },
        {40: ""},
    ),
    "priorities exceed the budget": case(
        {20: "", 60: "CtxOffloadProtectionFull"},
        hints_rejected_total='field="priority", reason="budget" | 0+1x90',
    ),
    "a client's hints are refused": case(
        {20: "", 60: "CtxOffloadHintsRejected"},
        hints_rejected_total='field="ttl_s", reason="type" | 0+120x90',
    ),
    "a few hints are refused": case(
        {60: ""}, hints_rejected_total='field="ttl_s", reason="type" | 0+6x90'
    ),
}


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert alerts == {
        alert for case in CASES.values() for alert in case.firing.values() if alert
    }


def unit_test(name: str, case: Case) -> dict[str, Any]:
    """Returns a test of promtool's: which alerts fire at which minute."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": series, "values": values.strip()}
            for series, values in case.series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
                if alert
                else [],
            }
            for minute, alert in case.firing.items()
        ],
    }


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should(name: str, tmp_path: Path) -> None:
    file = tmp_path / "test.yaml"
    tests = {"rule_files": [str(RULES)], "tests": [unit_test(name, CASES[name])]}
    file.write_text(yaml.safe_dump(tests), encoding="utf-8")
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
