# SPDX-License-Identifier: Apache-2.0
"""What came of the trainings of faults.py, in a few words."""

import dataclasses
import re

HANGS, SAME = "hangs", "same run"
AS_RESUMED, SILENT = "as that resume without the fault", "silently another run"


@dataclasses.dataclass
class Trial:
    """What a training has said, and how it ended."""

    events: list
    status: int | None  # exit status, -9 after SIGKILL; None: the training did not end in time
    log_tail: str = ""

    def of(self, name):
        return [event[1:] for event in self.events if event[0] == name]

    def began(self):
        """(step, digests) after the attach or load; None where it did not come to that."""
        found = self.of("ready")
        return found[0] if found else None

    def error(self):
        """The first line of the error; None if the trial had no error."""
        if self.of("error"):
            return self.of("error")[0][0]
        if self.status:
            how = f"signal {-self.status}" if self.status < 0 else f"status {self.status}"
            return f"ended by {how}: {self.log_tail}"
        return None


def outcome(trial, whole, undisturbed):
    """In a few words.

    whole        digests of the training that nothing disturbs, at the last step.
    undisturbed  {step: digests} at the last step of a resume from this step that nothing disturbs.
    """
    if trial.status is None:
        return HANGS
    if trial.error():
        return f"error: {trial.error()}"
    (last,) = trial.of("end")
    if last[1] == whole:
        return SAME
    if trial.began() and last[1] == undisturbed.get(trial.began()[0]):
        return AS_RESUMED
    return SILENT


def lost(saved, found):
    """Which digests of `saved` are others or none in `found`."""
    return [part for part, value in saved.items() if found.get(part) != value]


def counted(results):
    """["a", "b", "a"] as "2 of 3: a; 1 of 3: b", most frequent first."""
    results, frequency = list(results), {}
    for result in results:
        frequency[result] = frequency.get(result, 0) + 1
    if len(frequency) == 1:
        return results[0]
    order = sorted(frequency.items(), key=lambda pair: -pair[1])
    return "; ".join(f"{count} of {len(results)}: {result}" for result, count in order)


def as_saved(trial, digests, losses):
    """The outcome of a resume: its step, which digests differ from the save's, and the first step with another loss
    than the training that nothing disturbs, whose losses by step are `losses`."""
    step, loaded = trial.began()
    other = [at for at, loss in trial.of("step") if losses[at] != loss]
    return {
        "loaded_step": step,
        "not_as_saved": lost(digests, loaded),
        "first_other_loss": other[0] if other else None,
    }


def alike(result):
    """Without the paths and numbers of its error."""
    how, error, text = result.partition("error: ")
    return how + error + re.sub(r"/\S+/", "…/", re.sub(r"\b[0-9a-f]*[0-9][0-9a-f]*\b", "N", text))


def table(rows):
    lines = ["| fault | by | where | result |", "| --- | --- | --- | --- |"]
    for row in rows:
        fault, by, where = (row[key] for key in ("fault", "by", "where"))
        lines.append(f"| {fault} | {by} | {where} | {row['result'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def scrub_words(status, report):
    """Of what `forebay scrub` found: its status, and its report in JSON, else its error."""
    if isinstance(report, str):
        return f"scrub: {report.splitlines()[0]}"
    found = [slot["what"] for job in report["jobs"] for slot in job["damaged"]]
    for key in ("damaged_labels", "damaged_records", "damaged_ledgers"):
        found += [key.removeprefix("damaged_")] if report.get(key) else []
    return f"scrub: status {status}, damaged: {', '.join(found) or 'nothing'}"


class Rows(list):
    def note(self, fault, by, where, result, **more):
        row = {"case": f"faults/{fault}/by={by}/where={where}", "fault": fault, "by": by}
        self.append(row | {"where": where, "result": result} | more)
        print(f"{fault} | {by} | {where} | {result}", flush=True)

    def count(self, fault, by, where, results, **more):
        """One row of many results: those that differ in paths and numbers of their errors alone are one."""
        self.note(fault, by, where, counted(map(alike, results)), results=results, **more)
