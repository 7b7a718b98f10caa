# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: --tier merge leaves out the tests of the table below, which take minutes. Each has a smaller one of its
kind that stays.

Usage   pytest -p tiers --tier merge PATH..., with tests/support on PYTHONPATH.

Without --tier every test runs, as in `tools/test --full`. A row that names no test, or no test that stays, is an error.
"""

from __future__ import annotations

import re

import pytest

PACKAGE = "tests/client/python_torch/"

# Tests that run only in the full tier ("*" stands for any text), each with a similar test that stays in the merge tier.
FULL = {
    "tests/bench/peers/sharded_test.py::test_both_sides_train_and_are_compared": (
        "tests/bench/peers/sharded_test.py::test_the_side_that_only_computes_takes_its_turns[1]"
    ),
    "tests/bench/peers/sharded_test.py::test_the_cpu_seconds_of_a_step_are_counted_without_deepspeed": (
        "tests/bench/peers/sharded_test.py::test_the_side_that_only_computes_takes_its_turns[1]"
    ),
    "tests/bench/peers/sharded_test.py::test_the_side_that_only_computes_takes_its_turns[2]": (
        "tests/bench/peers/sharded_test.py::test_the_side_that_only_computes_takes_its_turns[1]"
    ),
    "tests/tools/gpu_check_test.py::test_on_an_old_kernel_every_item_goes_on_and_names_what_is_missing": (
        "tests/tools/gpu_check_test.py::test_without_time_or_gpu_it_says_so"
    ),
    "tests/tools/gpu_check_test.py::test_the_items_about_speed_print_both_sides": (
        "tests/tools/gpu_check_test.py::test_without_time_or_gpu_it_says_so"
    ),
    "tests/tools/gpu_check_test.py::test_the_loop_for_accelerate_and_the_script_of_the_page_train": (
        "tests/client/python_torch/test_accelerate.py::*"
    ),
    "tests/bench/forebay_bench_process_test.py::test_bench_commit_shows_what_a_durable_step_writes_and_costs": (
        "tests/bench/forebay_bench_process_test.py::test_each_bench_prints_one_line_a_case[*"
    ),
    # Ranks of sharded jobs in 3 and 8 processes.
    PACKAGE + "test_sharded.py::test_on_ranks[3-*": PACKAGE + "test_sharded.py::test_on_ranks[2-*",
    PACKAGE + "test_sharded.py::test_on_ranks[8-*": PACKAGE + "test_sharded.py::test_on_ranks[4-*",
    # Kills and restarts: a shared and a sharded job remain, in DRAM and on swap.
    PACKAGE + "test_nodes.py::test_all_go_on_from_one_step_where_ranks_die[die=0@*": (
        PACKAGE + "test_nodes.py::test_all_go_on_from_one_step_where_ranks_die[die=3@*"
    ),
    PACKAGE + "test_nodes.py::test_all_go_on_from_one_step_where_ranks_die[die=0,1@*": (
        PACKAGE + "test_nodes.py::test_all_go_on_from_one_step_where_ranks_die[die=2,3@*"
    ),
    PACKAGE + "test_nodes_daemon.py::test_a_daemon_that_is_killed_keeps_what_it_has_prepared[*hold=0,1@*": (
        PACKAGE + "test_nodes_daemon.py::test_a_daemon_that_is_killed_keeps_what_it_has_prepared[*hold=2,3@*"
    ),
    PACKAGE + "test_remote_restart.py::test_ranks_go_on[sharded-swap]": (
        PACKAGE + "test_remote_restart.py::test_ranks_go_on[sharded-dram]"
    ),
    PACKAGE + "test_remote_restart.py::test_ranks_go_on[shared+loads-dram]": (
        PACKAGE + "test_remote_restart.py::test_ranks_go_on[shared-dram]"
    ),
    PACKAGE + "test_private_daemon.py::test_ranks_go_on_when_it_is_asked_to_stop[shared-*": (
        PACKAGE + "test_private_daemon.py::test_ranks_go_on_when_it_is_asked_to_stop[sharded-memory-swap]"
    ),
    PACKAGE + "test_daemon_restart.py::test_a_restart_of_the_daemon_costs_time_alone[sharded+loads-memory-dram]": (
        PACKAGE + "test_daemon_restart.py::test_a_restart_of_the_daemon_costs_time_alone[shared+loads-memory-dram]"
    ),
    PACKAGE + "test_daemon_restart.py::test_a_restart_of_the_daemon_costs_time_alone[shared-memory-dram]": (
        PACKAGE + "test_daemon_restart.py::test_a_restart_of_the_daemon_costs_time_alone[sharded-memory-dram]"
    ),
    PACKAGE + "test_daemon_restart.py::test_a_restart_of_the_daemon_costs_time_alone[sharded-epoch=3-dram]": (
        PACKAGE + "test_daemon_restart.py::test_a_restart_of_the_daemon_costs_time_alone[shared-step-dram]"
    ),
    PACKAGE + "test_daemon_kill.py::test_a_kill_of_the_daemon_costs_no_committed_step[sharded-memory-dram]": (
        PACKAGE + "test_daemon_kill.py::test_a_kill_of_the_daemon_costs_no_committed_step[sharded+passes-memory-dram]"
    ),
    PACKAGE + "test_daemon_kill.py::test_a_kill_of_the_daemon_costs_no_committed_step[sharded-epoch=3-dram]": (
        PACKAGE + "test_daemon_kill.py::test_a_kill_of_the_daemon_costs_no_committed_step[shared-step-swap]"
    ),
    PACKAGE + "test_daemon_kill.py::test_a_kill_of_the_daemon_costs_no_committed_step[sharded+leases-memory-swap]": (
        PACKAGE + "test_daemon_kill.py::test_a_kill_of_the_daemon_costs_no_committed_step[shared+lamb-memory-swap]"
    ),
    PACKAGE + "test_kept_memory.py::test_restarts_while_ranks_are_on_their_way_back": (
        PACKAGE + "test_kept_memory.py::test_a_restart_while_a_rank_is_not_back_yet"
    ),
    PACKAGE + "test_kept_run.py::test_a_training_goes_on_after_signals_and_kills": (
        PACKAGE + "test_kept_run.py::test_a_kill_of_all_its_processes_goes_back_to_the_durable_step[epoch=2-2]"
    ),
    PACKAGE + "test_kept_run.py::test_a_kill_of_all_its_processes_goes_back_to_the_durable_step[memory-0]": (
        PACKAGE + "test_kept_run.py::test_a_kill_of_all_its_processes_goes_back_to_the_durable_step[epoch=2-2]"
    ),
    PACKAGE + "test_processes.py::test_kill_and_resume_have_the_bits_of_an_uninterrupted_run": (
        PACKAGE + "test_daemon_kill.py::test_a_kill_of_the_daemon_costs_no_committed_step[shared-memory-dram]"
    ),
    PACKAGE + "test_processes.py::test_a_hundred_killed_trainers_leave_nothing": (
        PACKAGE + "test_remote_faults.py::test_a_trainer_that_is_killed_leaves_nothing"
    ),
    PACKAGE + "test_torchrun_kills.py::*": PACKAGE + "test_transformers.py::test_a_killed_rank_and_its_neighbour_go_on[*",
    # One test for several sizes, formats or models.
    PACKAGE + "test_weights_on_swap.py::test_in_the_smallest_limit_it_has_the_bits_that_it_has_in_dram[1-*": (
        PACKAGE + "test_weights_on_swap.py::test_in_the_smallest_limit_it_has_the_bits_that_it_has_in_dram[2-*"
    ),
    PACKAGE + "test_weights_on_swap.py::test_in_the_smallest_limit_it_has_the_bits_that_it_has_in_dram[3-*": (
        PACKAGE + "test_weights_on_swap.py::test_in_the_smallest_limit_it_has_the_bits_that_it_has_in_dram[2-*"
    ),
    PACKAGE + "test_world.py::test_ranks[by_file]": PACKAGE + "test_world.py::test_ranks[by_tcp]",
    PACKAGE + "test_transformers.py::test_losses_and_weights_are_those_of_the_plain_trainer[gpt2-*": (
        PACKAGE + "test_transformers.py::test_losses_and_weights_are_those_of_the_plain_trainer[bert-*"
    ),
    PACKAGE + "test_script_fuzz.py::test_an_update_that_is_off_by_more_than_roundings_is_found[sharded]": (
        PACKAGE + "test_script_fuzz.py::test_an_update_that_is_off_by_more_than_roundings_is_found[shared]"
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("merge", "full"), default="full", help="merge leaves out what takes minutes")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {pattern: _matching(pattern, items) for pattern in FULL}
    deselected = {id(item) for found in left_out.values() for item in found}
    stay = [item for item in items if id(item) not in deselected]
    collected = {_file_of(item.nodeid) for item in items}
    for pattern, smaller in FULL.items():
        if _file_of(pattern) in collected and not left_out[pattern]:
            raise pytest.UsageError(f"tests/support/tiers.py: no test is {pattern}")
        if _file_of(smaller) in collected and not _matching(smaller, stay):
            raise pytest.UsageError(f"tests/support/tiers.py: no test that stays in merge is {smaller}")
    if config.getoption("--tier") == "merge":
        config.hook.pytest_deselected(items=[item for item in items if id(item) in deselected])
        items[:] = stay


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _matching(pattern: str, items: list[pytest.Item]) -> list[pytest.Item]:
    expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    return [item for item in items if expression.fullmatch(item.nodeid)]
