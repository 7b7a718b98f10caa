# SPDX-License-Identifier: Apache-2.0
"""Goal    What the quickstart prints beside its claims, and writes of them.
Method  The claims over runs that did nothing but take their time; two claims written by hand.
"""

import json
import types

import claims as claims_of


def test_how_long_the_main_job_took_is_printed_and_no_claim(monkeypatch):
    run = types.SimpleNamespace(seconds=1000.0, status=0)
    evidence = types.SimpleNamespace(runs={"plain": run, "forebay": run})
    for name in ("_size_and_memory", "_swap", "_results", "_kill", "_exact", "_sharded", "_model"):
        monkeypatch.setattr(claims_of, f"_check{name}", lambda *_: None)
    claims = claims_of.Claims()
    claims_of.check_all(claims, evidence)
    assert "time" not in [claim.name for claim in claims.all]
    shown = claims_of.durations(evidence.runs, 2000.0)
    assert shown == "time: 2000 s (plain 1000 s, forebay 1000 s)"


def test_claims_json_has_what_each_claim_saw():
    claims = claims_of.Claims()
    claims.check("size", [1], "1 parameter")
    claims.attempt("sample", lambda: (False, "0 characters"))
    assert json.loads(claims.as_json()) == [
        {"name": "size", "holds": True, "seen": "1 parameter"},
        {"name": "sample", "holds": False, "seen": "0 characters"},
    ]
