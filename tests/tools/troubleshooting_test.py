# SPDX-License-Identifier: Apache-2.0
"""Goal    docs/reference/troubleshooting.md has every error id that the sources know, says what `forebay explain` says, and
        its examples are what the sources print; each id is provoked by a test.
Method  The page is generated from `forebay explain --json`; the ids come from the table in protocol/error.cc and from
        whatever names one in the rooms. Examples are compared with the string literals of the sources.
        `troubleshooting_test.py --write` writes the page.
"""

import json
import re
import sys
import textwrap

import pytest
from forebay_command import ROOT, forebay

PAGE = ROOT / "docs" / "reference" / "troubleshooting.md"
ROOMS = ("protocol", "pinned_mem", "nvme", "cpu_adam", "daemon", "client", "gpu", "tools/forebay")
SOURCES = {".cc", ".h", ".py", ".capnp"}
PIECE_MIN = 3  # least letters of a literal that is compared
SHOWN_MIN = 10  # least characters of the longest literal in an example
# Words that an example may contain in addition to numbers and literals of the sources: names, units, texts of errno and the
# driver.
NAMES = """gpt lora nobody nightly staging layers weight embedding complex torch lots swap forebay var tmp head cuda
NVIDIA bytes Cannot allocate memory No such file or directory Input output error an illegal access was encountered
CUDA_ERROR_ILLEGAL_ADDRESS""".split()
COLUMNS = 118

# The test that provokes each error, by the error's id. The test's assertions name the id.
PROVOKED_BY = {
    "E_INTERNAL": "daemon/fd_store_test.cc FdStoreTest.AServiceManagerThatIsGoneIsAnError",
    "E_DAEMON_GONE": "client/python/test_core.py test_a_killed_daemon_ends_a_blocked_call",
    "E_NO_DAEMON": "client/python_torch/test_package.py test_no_daemon_is_an_error_with_a_hint",
    "E_PROTOCOL": "client/attachment_test.cc AttachmentTest.AnotherProtocolVersionIsRefusedNamingBoth",
    "E_TIMEOUT": "client/python_torch/test_two_ranks.py test_one_rank_alone_waits_until_its_time_is_up",
    "E_PERMISSION": "daemon/refused_ranks_process_test.cc RefusedUser.MayNotAttachToTheJobOfAnother",
    "E_CONFIG": "daemon/config_test.cc Config.NamesFileLineAndTheNearestKey",
    "E_BUSY": "daemon/lifecycle_process_test.cc "
    "DaemonLifecycle.RefusesASecondDaemonOnTheSocketOrTheSwapWithThePid",
    "E_MEMLOCK": "daemon/startup_process_test.cc "
    "Startup.OfAServiceThatMayNotLockItsMemoryNamesTheLineToAdd",
    "E_DRAM_LIMIT": "daemon/hostile_process_test.cc HostileClient.WhoseModelDoesNotFitGetsEveryTermOfTheSum",
    "E_SWAP_PATH": "daemon/config_test.cc Forebayd.EndsWithTheErrorOfABadStart",
    "E_SWAP_NOSPC": "daemon/disk_fault_process_test.cc DiskFaults.ADiskThatIsTooSmallIsRefusedWithBothSizes",
    "E_SWAP_IO": "daemon/disk_fault_process_test.cc DiskFaults.AReadThatFailsAgainAndAgainIsAnErrorOfThatJob",
    "E_CORRUPT": "daemon/disk_fault_process_test.cc DiskFaults.LostMisplacedAndRottenBytesAreNamedAndNeverUsed",
    "E_JOB_NAME": "client/python_torch/test_reader.py test_what_cannot_be_read_is_refused_by_name",
    "E_LAYOUT": "client/attachment_test.cc AttachmentTest.AnotherLayoutIsRefusedWithBoth",
    "E_OPTION": "client/python/test_core.py test_errors_have_a_family_code_hint_and_say_whether_to_retry",
    "E_RANK": "client/python_torch/test_sharded.py test_without_a_process_group",
    "E_RANK_LOST": "client/exchange_test.cc ExchangeTest.ARankThatEndsIsAnErrorOfTheOthers",
    "E_FENCED": "client/python_torch/test_refusals.py "
    "test_a_second_attach_of_a_rank_fences_the_first_and_has_its_extra_state",
    "E_LEASE": "client/attachment_test.cc AttachmentTest.ErrorsCarryTheDaemonsTextAndTheSessionGoesOn",
    "E_RANGE": "client/python/test_core.py test_states_are_float32_in_the_order_of_elements",
    "E_RING": "daemon/hostile_process_test.cc HostileClient.LosesItsSessionWithAnImpossibleRingIndex",
    "E_STEP": "client/python_torch/test_two_ranks.py test_different_learning_rates_are_refused",
    "E_REMOTE": "client/python_torch/test_remote_refusals.py test_a_program_that_ends_by_itself_says_how",
    "E_GRAD_REPEAT": "daemon/refusal_process_test.cc RefusedCall.SecondGradientForAGroupNeedsAnotherAttempt",
    "E_NONFINITE": "client/attachment_test.cc "
    "AttachmentTest.ANonfiniteGradientIsRefusedByNameAndTheStepCanBeRepeated",
    "E_OVERFLOW": "client/python_torch/test_overflow.py test_weights_that_overflow_are_an_error_of_a_committed_step",
    "E_JOB_FAILED": "daemon/swap_fault_process_test.cc "
    "SwapFault.OverwrittenBlocksFailTheStepByNameAndTheJobAlone",
    "E_FORKED": "client/python/test_core.py test_a_forked_child_is_refused_and_ends_in_good_order",
    "E_UNSUPPORTED": "client/python_torch/test_clipping.py test_a_norm_within_backward",
    "E_EXTRA_STATE": "client/python_torch/test_buffers.py "
    "test_buffers_without_room_are_refused_at_attach_with_both_numbers",
    "E_INTERRUPTED": "client/session_fault_test.cc SessionFault.AnInterruptEndsAWaitThatHasNoTimeout",
    "E_NOT_READY": "client/python_torch/test_refusals.py test_detach_gives_private_parameters",
    "E_LIMIT": "daemon/hostile_descriptors_process_test.cc "
    "ConnectionLimit.IsNamedToTheUserWhoMeetsItAndLoggedOnce",
    "E_JOB_EXISTS": "client/attachment_process_test.cc "
    "AttachmentProcess.AnotherRunIsRefusedBeforeItTouchesTheJob",
    "E_GRAD_PARTIAL": "client/python_torch/test_attempts.py test_a_backward_that_was_broken_off_leaves_nothing",
    "E_GRAD_DROPPED": "client/python_torch/test_attempts.py "
    "test_a_rank_whose_partner_began_anew_brings_its_gradients_again",
    "E_DEVICE": "gpu/cuda_device_test.cc CudaFault.WhatFailsOnTheDeviceIsSaidByEachLaterCall",
    "E_DEVICE_MEMORY": "gpu/cuda_device_test.cc CudaDeviceTest.MemoryThatIsNotThereIsRefusedWithBothNumbers",
    "E_SWAP_TIMEOUT": "daemon/disk_fault_process_test.cc "
    "DiskFaults.AReadThatNeverEndsIsAnErrorOfThatJobAfterTheDeadline",
}

INTRODUCTION = """\
# Errors by their id

Every error of Forebay's reads `error[E_...]: what`, then `hint: what helps`. The id is stable: it never changes its
meaning. In Python it is `error.code`, in C `forebay_error_name()`, in C++ `protocol::IdOf(status)`; the class of the
exception and `error.retryable` say what a program can do about it. `forebay explain E_...` prints what stands here.

| class | what to do |
| --- | --- |
| `UsageError` | change the call; to repeat it as it is gives the same error. After `E_BUSY`, wait for what it names |
| `ResourceError` | release something or raise the limit, then repeat |
| `UnavailableError` | attach again, then repeat |
| `ForebayTimeoutError` | nobody knows whether the call took effect: repeat it with the same arguments |
| `DataLossError` | bytes are gone: go back to a durable step or a checkpoint |
| `ForebayError` | the base of all of them, alone for `E_INTERNAL` |

An id that is not here comes from `tools/quickstart` or `tools/test`, which say what the machine lacks.

<!-- from here on made by tests/tools/troubleshooting_test.py --write from tools/forebay/explain.cc -->
"""


def explained():
    done = forebay("explain", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def table_of_ids():
    """{"E_...": "k..."} of protocol/error.cc."""
    text = (ROOT / "protocol" / "error.cc").read_text(encoding="utf-8")
    return {name: constant for constant, name in re.findall(r'ErrorId::(k\w+), "(E_\w+)"', text)}


def wrapped(text):
    """As a paragraph: the words of a setting or a call stay in one piece of code."""
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def page():
    parts = [INTRODUCTION]
    for error in explained():
        again = "retryable" if error["retryable"] else "not retryable"
        parts.append(
            f"\n## {error['id']}\n\n`{error['class']}`, {again}.\n\n{wrapped(error['meaning'])}\n\n"
            f"{wrapped('**What to do:** ' + error['remedy'])}\n\n"
            f"```text\nerror[{error['id']}]: {error['example']}\n```\n"
        )
    return "".join(parts)


def sources():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix in SOURCES:
                yield path, path.read_text(encoding="utf-8")


def literals():
    """The pieces of text that the sources print, without what is put in between."""
    found = set()
    for path, text in sources():
        if path.name == "explain.cc":
            continue
        joined = re.sub(r'"\s*\n\s*f?"', "", text)
        for literal in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined):
            literal = literal.replace('\\"', '"')
            found |= set(re.split(r"%[-0-9.]*\w|\{[^}]*\}|\\n", literal))
    return {piece.strip(" ") for piece in found if len(re.findall("[A-Za-z]", piece)) >= PIECE_MIN}


def test_the_page_says_what_the_command_says():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run python3 tests/tools/troubleshooting_test.py --write"
    )


def test_every_id_is_explained_and_no_other():
    ids = table_of_ids()
    assert len(ids) == 41
    assert [error["id"] for error in explained()] == list(ids)
    named = {name for _, text in sources() for name in re.findall(r"\bE_[A-Z_]*[A-Z]\b", text)}
    assert named <= ids.keys(), "named in the sources, and not in protocol/error.cc"
    for error in explained():
        assert all(error[part] for part in ("meaning", "remedy", "example", "hint")), error["id"]


def test_the_class_is_the_one_that_python_raises():
    """Where Python makes an error itself, it has the class of the table."""
    classes = {error["id"]: error["class"] for error in explained()}
    made = 0
    for path in (ROOT / "client" / "python" / "forebay").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'usage_error\(\s*"(E_\w+)"', text):
            assert classes[name] == "UsageError", f"{path}: {name}"
            made += 1
        for family, name in re.findall(r'make_error\(\s*(\w+),\s*"(E_\w+)"', text):
            assert classes[name] == family, f"{path}: {name}"
            made += 1
    assert made > 40


def test_the_examples_are_texts_of_the_sources():
    pieces = sorted(literals(), key=len, reverse=True)
    for error in explained():
        rest = error["example"]
        used = [piece for piece in pieces if piece in rest]
        for piece in used:
            before, after = (r"\b" if end.isalpha() else "" for end in (piece[0], piece[-1]))
            rest = re.sub(f"{before}{re.escape(piece)}{after}", "\0", rest)
        words = re.findall(r"[A-Za-z_]{3,}", re.sub(r"\d+(\.\d+)? [KMGT]?iB\b", "", rest))
        assert not set(words) - set(NAMES), f"no source says so: {error['example']}"
        assert len(used[0]) >= SHOWN_MIN, error["example"]


def test_the_command_explains_one_and_refuses_what_it_does_not_know():
    text = forebay("explain", "E_GRAD_PARTIAL").stdout
    for word in ("E_GRAD_PARTIAL (forebay.UsageError, not retryable)", "what to do: ", "zero_grad()"):
        assert word in text
    assert len(forebay("explain").stdout.splitlines()) == 1 + len(table_of_ids())
    [one] = json.loads(forebay("explain", "E_LIMIT", "--json").stdout)
    assert one["class"] == "ResourceError" and one["retryable"] is True
    unknown = forebay("explain", "E_LIMITS")
    assert unknown.returncode == 1 and "there is no error E_LIMITS" in unknown.stderr


def body_of(path, case):
    """The text of one test, without comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cc":
        suite, name = case.split(".")
        start = re.search(rf"^TEST(_[FP])?\({suite}, {name}\)", text, re.M)
        end = re.compile(r"^}$", re.M)
        comment = r"//[^\n]*"
    else:
        start = re.search(rf"^def {case}\(", text, re.M)
        end = re.compile(r"^(?=def |@|class )", re.M)
        comment = r"(?m)^\s*#[^\n]*"
    assert start, f"{path} has no test {case}"
    stop = end.search(text, start.end())
    return re.sub(comment, "", text[start.start() : stop.start() if stop else len(text)])


@pytest.mark.parametrize("name", table_of_ids())
def test_is_provoked(name):
    assert name in PROVOKED_BY, f"no test provokes {name}"
    file, case = PROVOKED_BY[name].split()
    body = body_of(ROOT / "tests" / file, case)
    assert re.search(rf"\b{name}\b|ErrorId::{table_of_ids()[name]}\b", body), f"{case}: no {name}"
    assert re.search(r"\b(EXPECT|ASSERT)_|\bassert\b|\b(raises|refused|ExpectRefusal)\(", body), case


def test_nothing_else_is_said_to_be_provoked():
    assert PROVOKED_BY.keys() == table_of_ids().keys()


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(page(), encoding="utf-8")
