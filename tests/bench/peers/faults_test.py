# SPDX-License-Identifier: Apache-2.0
"""Goal    The comparison under faults says what has happened: a run that is another one is never called the
        same, and an end without a word is an error.
Method  Made-up trials: DeepSpeed is not installed here. Damage is done to files of the test's own.
"""

import faults_outcome as faults
import faults_process
import pytest

WHOLE = {"weights": "a", "moments": "b"}
RESUMED = {"weights": "a", "moments": "c"}
OTHER = {"weights": "d", "moments": "b"}


def trial(last, began=4, status=0, **more):
    events = [["ready", began, WHOLE], ["step", 8, "0x1p+2"]]
    if last is not None:
        events.append(["end", 8, last])
    return faults.Trial(events + more.pop("events", []), status, **more)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (trial(WHOLE), faults.SAME),
        (trial(RESUMED), faults.AS_RESUMED),
        (trial(RESUMED, began=6), faults.SILENT),  # resumed from another step than the reference
        (trial(OTHER), faults.SILENT),
        (trial(None, status=None), faults.HANGS),
        (trial(None, status=1, events=[["error", "OSError: full"]]), "error: OSError: full"),
        (trial(None, status=-7, log_tail="step 5"), "error: ended by signal 7: step 5"),
        (trial(None, status=2, log_tail="usage"), "error: ended by status 2: usage"),
    ],
)
def test_a_trial_is_named_by_its_end(made, said):
    assert faults.outcome(made, WHOLE, {4: RESUMED}) == said


def test_what_is_lost_is_named():
    assert faults.lost(WHOLE, WHOLE) == []
    assert faults.lost(WHOLE, RESUMED) == ["moments"]
    assert faults.lost(WHOLE, {"weights": "a"}) == ["moments"]


def test_results_are_counted():
    assert faults.counted(["a", "a"]) == "a"
    assert faults.counted(["a", "b", "b"]) == "2 of 3: b; 1 of 3: a"


def test_errors_are_alike_but_for_paths_and_numbers():
    for text in ("/a/b: 3 bytes", "/c/b: 44 bytes"):
        assert faults.alike(f"from step 4: error: {text}") == "from step 4: error: …/b: N bytes"
    assert faults.alike(faults.SAME) == faults.SAME


def test_what_a_scrub_finds_is_named():
    job = {"damaged": [{"what": "block 2"}]}
    report = {"jobs": [job], "damaged_records": 1, "damaged_labels": 0}
    assert faults.scrub_words(1, report) == "scrub: status 1, damaged: block 2, records"
    assert faults.scrub_words(0, {"jobs": []}) == "scrub: status 0, damaged: nothing"
    assert faults.scrub_words(1, "error[E_BUSY]: x\nhint: y") == "scrub: error[E_BUSY]: x"


def test_one_bit_is_flipped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8))
    faults_process.flip(path, 5, 3)
    assert path.read_bytes() == bytes([0, 0, 0, 0, 0, 8, 0, 0])
    faults_process.flip(path, 5, 3)
    assert path.read_bytes() == bytes(8)


def test_rows_become_a_table(capsys):
    rows = faults.Rows()
    rows.note("resume", "one side", "from step 4", "error: a|b")
    assert rows[0]["case"] == "faults/resume/by=one side/where=from step 4"
    assert "| resume | one side | from step 4 | error: a/b |" in faults.table(rows)
    assert "error: a|b" in capsys.readouterr().out
