# SPDX-License-Identifier: Apache-2.0
"""Goal    The forebay command does what a person at a shell expects: exit codes, signals passed on,
        errors with their id, and no residue of `run`, however it ends.
Method  Real processes of build/bin. Commands tell by their standard output that they have begun;
        ends are awaited by pidfd, each with a deadline.
"""

import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import tempfile

import pytest
from forebay_command import (
    BENCH_KEYS,
    DEADLINE_S,
    FOREBAY,
    ROOT,
    Started,
    await_end,
    begin_own_group,
    folders_of_run,
    forebay,
    run_flags,
)
from kill_at_once import kill_at_once

SWAP = "--swap {swap} --swap-size 64MiB"

# Trains one step of a small job on the daemon of FOREBAY_SOCKET.
TRAIN = ("sh", "-c", f'"{FOREBAY.parent.parent}/tests/held_client" "$FOREBAY_SOCKET" 0 1 step')


@pytest.fixture
def folders(tmp_path):
    with folders_of_run(tmp_path, "swap") as made:
        yield made


def test_no_daemon_says_how_to_start_one_and_exits_3(folders):
    environment, runtime, _ = folders
    dead = runtime / "dead.sock"  # as a killed daemon leaves it: nobody listens
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(dead))
    for path in (runtime / "none.sock", dead):
        for view in ("status", "mem", "swap", "jobs"):
            done = forebay(view, "--socket", path, env=environment)
            assert done.returncode == 3
            assert f"error[E_NO_DAEMON]: no daemon answers: connect to {path}" in done.stderr
            assert "hint: start one with `forebay run -- COMMAND`" in done.stderr
    dead.unlink()


def trains(environment, *flags):
    done = forebay("run", *flags, "--", *TRAIN, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_limit_below_the_models_minimum_names_the_terms_and_one_that_is_enough(folders):
    environment, _, _ = folders
    one_worker = ["--set", "update.workers=1"]
    for_itself = 4 * 1024 + 64  # KiB of the daemon's private memory
    small = forebay("run", "--dram", f"{for_itself - 1}KiB", *one_worker, "--", *TRAIN, env=environment)
    assert small.returncode == 1
    assert "error[E_DRAM_LIMIT]: the daemon's private memory takes 4.1 MiB" in small.stderr
    done = forebay("run", "--dram", f"{for_itself}KiB", *one_worker, "--", *TRAIN, env=environment)
    assert done.returncode == 1
    for term in ("error[E_DRAM_LIMIT]: the job needs", "weights", "gradient sums", "overflow"):
        assert term in done.stderr
    for term in ("gradient arena", "ring", "states", "the limit is 4.1 MiB"):
        assert term in done.stderr
    enough = re.search(r"hint: raise --dram / dram.limit to at least (\d+) bytes", done.stderr)
    trains(environment, "--dram", enough[1], *one_worker)


LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
    **{"vocab_size": 128256, "tie_word_embeddings": False},
}
QWEN2 = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
QWEN3 = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936}
# Published models: the authors' config and number of parameters.
MODELS = [
    ({**LLAMA}, 8_030_261_248),
    ({**LLAMA, "model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8}, 46_702_792_704),
    (
        {**QWEN2, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28},
        7_615_616_512,
    ),
    (
        {
            **{**QWEN3, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
            **{"num_hidden_layers": 28, "tie_word_embeddings": True},
        },
        596_049_920,
    ),
    (
        {
            **{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024},
            **{"vocab_size": 50257, "n_inner": None},
        },
        124_439_808,
    ),
]


def plan(folders, *words):
    environment, _, swap = folders
    own = SWAP.format(swap=swap).split()
    return forebay("run", "--dram", "512MiB", *own, "--", FOREBAY, "plan", *words, env=environment)


@pytest.mark.parametrize(("config", "params"), MODELS, ids=[one["model_type"] for one, _ in MODELS])
def test_plan_knows_published_models(folders, tmp_path, config, params):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--hf", tmp_path / "config.json", "--ranks", 8)
    done = plan(folders, *model, "--dram", "4TiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Format exact has 2 bytes of weights and 10 of states for each parameter. Shards begin on pages, boxes on 64 elements.
    assert 2 * params <= found["weights"] <= 2.01 * params
    assert 10 * params <= found["states"] <= 10.01 * params
    assert found["swap"] == found["step_read"] == found["weights_on_swap"] == 0
    job = ("weights", "weights_cache", "states", "sums", "extra_state", "sessions", "tables", "node")
    assert sum(found[part] for part in job) == found["all_in_dram"]
    text = plan(folders, *model, "--dram", "4TiB").stdout
    assert text.startswith(f"{config['model_type']}: {params} parameters in ")


def test_plan_says_what_is_on_swap_and_what_does_not_fit(folders):
    model = ("--params", 10**9, "--ranks", 4)
    swapped = plan(folders, *model, "--dram", "3GiB", "--swap-size", "1TiB", "--json")
    assert swapped.returncode == 0, swapped.stderr
    found = json.loads(swapped.stdout)
    assert found["weights_on_swap"] > 0 and found["resident_blocks"] == 0
    assert found["step_read"] == found["step_written"] + 2 * found["weights_on_swap"]
    rates = ("--read-rate", 10, "--write-rate", 5)
    text = plan(folders, *model, "--dram", "3GiB", "--swap-size", "1TiB", *rates).stdout
    seconds = found["step_read"] / 10e9 + found["step_written"] / 5e9
    assert f"the disk works {seconds:.2f} s a step, at 10 GB/s read and 5 written" in text
    # Gradient arenas hold the gradients of three layers for GPUs, and two pieces of 32 MiB for CPUs.
    large = ("--layers", "32", "--width", "4096", "--format", "int8", "--dram", "64GiB")
    on_cpu, on_gpu = (
        json.loads(plan(folders, *large, "--json", *flag).stdout)["sessions"] for flag in ((), ("--gpu",))
    )
    of_layer = 2 * 12 * 4096**2  # bytes of a layer's matrices in bfloat16
    assert 3 * of_layer - (64 << 20) <= on_gpu - on_cpu <= 3.01 * of_layer
    refused = plan(folders, *large, "--gpu", "--shared")
    assert refused.returncode != 0 and "--shared excludes --gpu" in refused.stderr
    # If all weights are resident, early updates need DRAM for new weights. Without early updates states use that DRAM.
    early, late = (
        json.loads(plan(folders, *model, "--dram", "8GiB", "--swap-size", "1TiB", "--json", *flag).stdout)
        for flag in ((), ("--no-early-updates",))
    )
    assert early["new_weights"] > 0 == late["new_weights"]
    assert early["resident_blocks"] < late["resident_blocks"]
    # Gradients that do not fit in DRAM go to swap. The plan counts their bytes separately.
    spilled = json.loads(plan(folders, *model, "--dram", "512MiB", "--swap-size", "1TiB", "--json").stdout)
    assert spilled["weights_on_swap"] == 2 * 10**9 > spilled["gradients_on_swap"] > 10**9
    assert found["gradients_on_swap"] == 0
    assert spilled["sums"] < 512 << 20 and spilled["step_read"] == spilled["step_written"] + 2 * 2 * 10**9
    rates = (*rates, "--compute", 20)
    text = plan(folders, *model, "--dram", "512MiB", "--swap-size", "1TiB", *rates).stdout
    assert "1.7 GiB more each way for gradients" in text
    assert "with 20 s of compute a step takes 20.00 s: the disk waits for compute" in text
    late = plan(folders, *model, "--dram", "512MiB", "--swap-size", "1TiB", "--no-early-updates", *rates).stdout
    assert float(re.search(r"a step takes ([\d.]+) s: the disk after compute", late)[1]) > 23
    small = plan(folders, *model, "--dram", "256MiB", "--swap-size", "1TiB")
    assert small.returncode == 1 and "error[E_DRAM_LIMIT]: the job needs" in small.stderr
    enough = re.search(r"hint: raise --dram / dram.limit to at least (\d+) bytes", small.stderr)
    assert plan(folders, *model, "--dram", enough[1], "--swap-size", "1TiB").returncode == 0
    less = plan(folders, *model, "--dram", int(enough[1]) - 4096, "--swap-size", "1TiB")
    assert "error[E_DRAM_LIMIT]" in less.stderr
    little = plan(folders, *model, "--dram", "3GiB", "--swap-size", "1GiB")
    assert "error[E_SWAP_NOSPC]: the job needs" in little.stderr


def test_plan_says_what_to_lower_and_that_fits(folders):
    model = ("--params", 10**8, "--ranks", 4)
    refused = plan(folders, *model, "--dram", "1100MiB")
    assert refused.returncode == 1
    assert re.search(r"format bf16: \d+ bytes \([\d.]+ MiB\) less, which fits", refused.stderr), refused.stderr
    assert plan(folders, *model, "--dram", "1100MiB", "--format", "bf16").returncode == 0
    limits = [
        int(found)
        for found in re.findall(
            r"of (\d+) bytes \([\d.]+ \wiB\) (?:does for a job with its states|with its \w+ too)", refused.stderr
        )
    ]
    assert len(limits) == 3 and limits == sorted(limits, reverse=True), refused.stderr
    for limit in limits:
        assert plan(folders, *model, "--dram", limit, "--swap-size", "64GiB").returncode == 0
    assert plan(folders, *model, "--dram", limits[2] - 4096, "--swap-size", "64GiB").returncode == 1


def test_plan_shows_each_rank_and_what_trainers_hold(folders):
    model = ("--params", 10**8 + 7, "--layers", 8, "--ranks", 3)
    where = ("--dram", "500MiB", "--swap-size", "64GiB")
    found = json.loads(plan(folders, *model, *where, "--json").stdout)
    ranks = found["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    for term in ("weights", "weights_cache", "states", "weights_on_swap"):
        assert sum(rank[term] for rank in ranks) == found[term], term
    assert sum(rank["states_on_swap"] for rank in ranks) > 9 * 10**8
    # FSDP2 cuts 12500001 elements of 2 bytes into equal chunks for three ranks.
    assert [rank["largest_partition"] for rank in ranks] == [2 * 4166667] * 3
    arena = ("grad_arena", "step_region", "activations", "trace", "ring", "extra_state_copy")
    assert 3 * sum(found[part] for part in arena) == found["sessions"]
    text = plan(folders, *model, *where).stdout
    assert re.search(r"each rank has an arena of [\d.]+ MiB for gradients, .* for its ring", text), text
    assert re.search(r"^RANK +WEIGHTS +CACHE ", text, re.MULTILINE), text
    gathered = "beside that each trainer itself holds gathered groups: 47.7 MiB of two layers"
    assert gathered in text and "belongs to no layer" not in text
    decoder = ("--layers", 2, "--width", 64, "--vocab", 16384, "--dram", "1GiB")
    text = plan(folders, *decoder).stdout
    assert "and 4.0 MiB of what belongs to no layer" in text, text
    assert "trainer itself" not in plan(folders, *decoder, "--shared").stdout
    assert "LARGEST SHARD" not in plan(folders, *decoder, "--shared").stdout


def test_plan_of_a_gpu_says_what_shows_beside_compute(folders):
    """The memory is the daemon's, the time is that of `forebay plan --nodes 1`."""
    model = ("--params", 3_430_000_000, "--layers", 28, "--recompute", "--gpu-tflops", 450)
    rates = ("--host-link-rate", 45, "--update-rate", 155)
    on_node = ("--gpu", *model, *rates)
    on_gpu = ("--dram", "60GiB", *on_node)
    text = plan(folders, *on_gpu, "--tokens", 16384).stdout
    for part in ("compute of 16384 tokens", "DRAM to the GPUs", "update, after", "additions", "tail"):
        assert re.search(rf"^{part}.* 0\.\d\d\d$", text, re.M), (part, text)
    assert "a step takes 1.348 s and waits for update: 35 % more than compute" in text, text
    assert re.search(r"^--format int8 takes 1\.08\d s, 9 % more than compute$", text, re.M), text
    (tokens,) = map(int, re.findall(r"^more tokens a step hide more: from (\d+) on, only the tail shows$", text, re.M))
    closed = plan(folders, "--nodes", 1, "--gpus", 1, *model, *rates, "--tokens", 16384, "--json")
    found = json.loads(plan(folders, *on_gpu, "--tokens", 16384, "--json").stdout)["seconds"]
    expected = json.loads(closed.stdout)["seconds"]
    assert all(found[part] == pytest.approx(expected[part]) for part in expected if part != "bound")
    assert found["hiding_tokens"] == tokens
    # From that number on only the tail shows. With one part in a hundred less, the update shows.
    enough, few = (
        json.loads(plan(folders, *on_gpu, "--tokens", count, "--json").stdout)["seconds"]
        for count in (tokens, tokens * 99 // 100)
    )
    assert enough["step"] == pytest.approx(enough["compute"] + enough["tail"], rel=1e-4)
    assert few["step"] > (few["compute"] + few["tail"]) * 1.001
    assert "more tokens" not in plan(folders, *on_gpu, "--tokens", tokens).stdout
    # The states that the limit has no room for are read and written.
    swapped = (*on_node, "--tokens", 16384, "--dram", "30GiB", "--swap-size", "256GiB")
    text = plan(folders, *swapped, "--read-rate", 6, "--write-rate", 4).stdout
    assert re.search(r"a step takes \d+\.\d+ s and waits for swap: \d+ % more than compute", text), text
    assert "not counted" not in text
    assert "the disk is not counted: give --read-rate" in plan(folders, *swapped).stdout
    refused = plan(folders, *model, *rates)
    assert refused.returncode == 1 and "hint: give --gpu or --nodes" in refused.stderr
    for without_time in (
        ("--params", 1000000, "--tokens", 4096),
        ("--params", 1000000, "--gpu", "--recompute"),
        ("--job", "none", "--gpu", "--gpu-tflops", 450),
        ("--gpu", *model, *rates, "--compute", 1),
    ):
        refused = plan(folders, *without_time)
        assert "error[E_OPTION]" in refused.stderr and "step on GPUs" in refused.stderr, without_time


def test_plan_counts_buffers(folders):
    """As an attach of them does: room in whole units of 64 KiB, for two steps of each rank."""
    model = ("--params", 10**6, "--ranks", 2, "--dram", "4GiB", "--json")
    without, with_buffers = (json.loads(plan(folders, *model, *more).stdout) for more in ((), ("--buffers", "99MiB")))
    assert with_buffers["extra_state"] - without["extra_state"] == 2 * 2 * (99 << 20)
    assert with_buffers["all_in_dram"] > without["all_in_dram"] + 2 * 2 * (99 << 20)
    many = plan(folders, *model, "--buffers", "481MiB")
    assert many.returncode == 1 and "error[E_EXTRA_STATE]: " in many.stderr and "503316480" in many.stderr, many.stderr
    none = plan(folders, *model, "--buffers", "some")
    assert none.returncode == 1 and "error[E_OPTION]: some is no size" in none.stderr


def test_plan_of_a_job_that_is_there_is_what_it_takes(folders):
    environment, _, swap = folders
    views = (
        f'"{FOREBAY}" jobs --json; "{FOREBAY}" plan --job job --json; "{FOREBAY}" plan --job job;'
        f' "{FOREBAY}" plan --job job --dram 1GiB --json'
    )
    shown = forebay(*run_flags(swap), "sh", "-c", f"{shlex.join(TRAIN)} >&2; {views}", env=environment)
    assert shown.returncode == 0, shown.stderr
    decoder = json.JSONDecoder()
    jobs, end = decoder.raw_decode(shown.stdout)
    now, begin = decoder.raw_decode(shown.stdout[end:].lstrip())
    text, _, rest = shown.stdout[end:].lstrip()[begin:].lstrip().partition("{")
    elsewhere = json.loads("{" + rest)
    (job,) = jobs
    kind = f"{job['optimizer']}, {job['format']}"
    assert text.startswith(f"job job: {job['params']} parameters, {kind}, 1 rank\n"), text
    terms = ("weights", "weights_cache", "states", "sums", "new_weights", "extra_state", "sessions", "tables")
    assert now["limit"] == 256 << 20 and now["others"] == 0
    assert (now["blocks"], now["swap"]) == (job["blocks"], job["swap_bytes"])
    assert elsewhere["limit"] == 1 << 30
    assert [elsewhere[term] for term in terms] == [now[term] for term in terms]
    none = plan(folders, "--job", "none")
    assert none.returncode == 1 and "error[E_JOB_NAME]: there is no job none" in none.stderr
    assert "plan needs one model" in plan(folders, "--job", "job", "--params", 10).stderr


def test_plan_counts_the_swap_of_durable_steps(folders):
    environment, _, swap = folders
    kept = ["--set", "swap.life=kept", "--set", "swap.probe=never", "--"]
    model = ("--params", 10**7, "--dram", "4GiB", "--swap-size", "1TiB", "--json")

    def swap_at(level):
        words = (*run_flags(swap)[:-1], *kept, FOREBAY, "plan", *model, "--durability", level)
        done = forebay(*words, env=environment)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["resident_blocks"] == found["blocks"]
        return found, found["swap"]

    memory, none = swap_at("memory")
    # Durable levels need swap slots for each block and each part of the weights, resident or not.
    _, at_step = swap_at("step")
    _, at_epoch = swap_at("epoch=10")
    assert none == 0
    assert at_step >= 3 * (memory["states"] + 2 * 10**7)
    assert at_epoch >= 4 * memory["states"] + 3 * 2 * 10**7
    assert at_step < at_epoch


def test_plan_refuses_what_it_cannot_know(folders, tmp_path):
    config = tmp_path / "config.json"
    for text, message in (
        ("no json", "cannot be read as JSON"),
        ("[]", "the config has no model_type"),
        ('{"model_type": "bert"}', "models of type bert are not known here"),
        ('{"model_type": "llama"}', "the config has no number hidden_size"),
        (json.dumps({**LLAMA, "vocab_size": -1}), "the config has no number vocab_size"),
        (json.dumps({**LLAMA, "vocab_size": 0}), "the config has no number vocab_size"),
        (json.dumps({**LLAMA, "hidden_size": 2**40}), "the config has no number hidden_size"),
        (json.dumps({**LLAMA, "num_hidden_layers": 10**6}), "no number num_hidden_layers"),
        ('{"model_type": 5}', "the config has no model_type"),
        ('{"model_type": "a\\u001bz"}', "models of type a\\x1bz are not known"),
        (json.dumps({**LLAMA, "num_attention_heads": 8192}), "no number num_attention_heads"),
        (json.dumps({**LLAMA, "hidden_size": 2**24, "vocab_size": 2**24}), "error[E_LAYOUT]"),
        (
            json.dumps(
                {**LLAMA, "model_type": "mixtral", "num_local_experts": 1024, "num_hidden_layers": 4096}
            ),
            "no number num_local_experts",
        ),
        (
            json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 10**6}),
            "no number num_local_experts",
        ),
    ):
        config.write_text(text)
        done = plan(folders, "--hf", config)
        assert done.returncode == 1 and message in done.stderr, text
    assert "cannot be read as JSON" in plan(folders, "--hf", tmp_path).stderr
    assert "nan is no rate" in plan(folders, "--params", 100000, "--read-rate", "nan").stderr
    assert plan(folders, "--params", 100000, "--read-rate", "-1").returncode == 2
    assert "plan needs one model" in plan(folders).stderr
    assert "plan needs one model" in plan(folders, "--params", 10, "--hf", config).stderr
    assert "no size" in plan(folders, "--params", 100000, "--dram", "much").stderr
    assert "error[E_OPTION]" in plan(folders, "--params", 100000, "--dtype", "int3").stderr
    hourly = plan(folders, "--params", 100000, "--durability", "hourly")
    assert 'error[E_OPTION]: "hourly" is no level of durability\nhint: ' in hourly.stderr
    environment, runtime, _ = folders
    alone = forebay("plan", "--params", 10, "--socket", runtime / "none.sock", env=environment)
    assert alone.returncode == 3


def test_usage_errors_exit_2_and_help_and_version_exit_0():
    assert forebay().returncode == 2
    wrong = forebay("status", "--nonsense")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error[E_OPTION]: ") and "--nonsense" in wrong.stderr
    assert "the command that run or launch starts follows --" in forebay("run", "true").stderr
    unknown = forebay("stauts")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error[E_OPTION]: there is no command stauts\nhint: ")
    ignored = forebay("run", "--swap-size", "1GiB", "--", "true")
    assert ignored.returncode == 2 and "--swap-size requires --swap" in ignored.stderr
    assert forebay("run", "--dram", "1GiB").returncode == 2  # no command
    assert forebay("--help").returncode == 0
    assert forebay("--version").stdout.startswith("forebay ")


def test_run_passes_on_the_exit_status(folders):
    environment, _, swap = folders
    for status in (0, 7):
        assert (
            forebay(*run_flags(swap), "sh", "-c", f"exit {status}", env=environment).returncode
            == status
        )
    done = forebay(*run_flags(swap), "/does/not/exist", env=environment)
    assert done.returncode == 127
    assert "execute /does/not/exist: No such file or directory\nhint: name a program" in done.stderr


def test_run_ends_by_the_signal_that_ended_its_command(folders):
    environment, _, swap = folders
    done = forebay(*run_flags(swap), "sh", "-c", "kill -KILL $$", env=environment)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_run_passes_signals_to_its_command(folders, number):
    script = f"trap 'exit 42' {number.name[3:]}; echo $$; while :; do read -r line || sleep 0.01; done"
    started = Started(folders, script)
    started.process.send_signal(number)
    # A shell that enters read(2) just as the signal arrives runs its trap only after read returns. At the end of its input each
    # read returns at once. One newline would not suffice: an earlier read may consume it.
    started.process.stdin.close()
    assert started.wait() == 42
    await_end(started.daemon)


def test_nothing_is_left_after_a_kill_of_run(folders):
    started = Started(folders, "sh -c 'read -r line' <&0 & echo $$ $!; while :; do wait; done")
    started.process.kill()
    assert started.wait() == -signal.SIGKILL
    for pid in (*started.pids, started.daemon, started.supervisor):
        await_end(pid)


def test_nothing_is_left_after_a_kill_of_its_process_group(folders):
    started = Started(folders, start_new_session=True)
    os.killpg(started.process.pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    for pid in (*started.pids, started.daemon, started.supervisor):
        await_end(pid)


def test_nothing_is_left_after_a_kill_of_the_second_process(folders):
    started = Started(folders, "setsid sh -c 'read -r line' <&0 & echo $$ $!; read -r line")
    os.kill(started.supervisor, signal.SIGKILL)
    assert started.wait() == 1
    for pid in (*started.pids, started.daemon):
        await_end(pid)


def test_what_a_kill_of_both_processes_leaves_is_removed_by_the_next_run(folders):
    environment, runtime, swap = folders
    started = Started(folders, begin=begin_own_group)
    kill_at_once(started.process.pid, started.supervisor)
    assert started.wait() == -signal.SIGKILL
    for pid in (*started.pids, started.daemon, started.supervisor):
        await_end(pid)
    assert len([*swap.iterdir()]) == len([*runtime.iterdir()]) == 1
    assert forebay(*run_flags(swap), "true", env=environment).returncode == 0
    assert [*swap.iterdir(), *runtime.iterdir()] == []


def test_a_run_leaves_what_another_one_uses(folders):
    environment, runtime, swap = folders
    started = Started(folders)
    before = {*swap.iterdir(), *runtime.iterdir()}
    assert forebay(*run_flags(swap), "true", env=environment).returncode == 0
    assert {*swap.iterdir(), *runtime.iterdir()} == before
    (at,) = runtime.glob("*/forebay.sock")
    assert forebay("status", "--socket", at, env=environment).returncode == 0
    started.process.stdin.close()
    assert started.wait() == 5


def test_what_the_command_leaves_running_ends_with_it(folders):
    started = Started(
        folders, "setsid sh -c 'trap \"\" HUP; exec tail -f /dev/null' & echo $$ $!; read -r line"
    )
    started.process.stdin.write("\n")
    started.process.stdin.flush()
    started.wait()
    for pid in (*started.pids, started.daemon, started.supervisor):
        await_end(pid)


def test_a_command_sees_its_private_daemon(folders):
    environment, runtime, swap = folders
    done = forebay(*run_flags(swap), FOREBAY, "status", "--json", env=environment)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["socket_path"].startswith(str(runtime))
    assert status["memory"]["limit_bytes"] == 256 << 20
    assert status["swap"][0]["path"].startswith(str(swap)) and status["swap"][0]["direct"]
    for view in ("status", "mem", "swap", "jobs"):
        shown = forebay(*run_flags(swap), FOREBAY, view, env=environment)
        assert shown.returncode == 0 and shown.stdout, shown.stderr


@pytest.mark.parametrize(
    "flags, error, words, fixed",
    [
        ("--swap /does/not/exist", "E_SWAP_PATH", ["swap path /does/not/exist", "No such"], SWAP),
        ("--swap ''", "E_SWAP_PATH", ["empty"], SWAP),
        ("--dram 0", "E_CONFIG", ["dram.limit", "is 0"], "--dram 1GiB"),
        (f"--dram 1MiB {SWAP}", "E_DRAM_LIMIT", ["staging", "1.0 MiB"], f"--dram 1GiB {SWAP}"),
        ("--swap {swap} --swap-size 1000000GiB", "E_SWAP_NOSPC", ["free", "GiB"], SWAP),
        ("--set dram.limt=1GiB", "E_CONFIG", ["dram.limt", "dram.limit?"], "--set dram.limit=1GiB"),
        ("--config /does/not/exist.toml", "E_CONFIG", ["/does/not/exist.toml"], ""),
    ],
)
def test_what_cannot_start_is_refused_with_its_id_and_fixed_trains(
    folders, flags, error, words, fixed
):
    environment, _, swap = folders
    flags, fixed = (shlex.split(some.replace("{swap}", str(swap))) for some in (flags, fixed))
    done = forebay("run", *flags, "--", "echo", "started", env=environment)
    assert done.returncode == 1 and "started" not in done.stdout
    assert f"error[{error}]: " in done.stderr and "\nhint: " in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    trains(environment, *fixed)


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "com,ma", "ünï"])
def test_folders_may_have_any_name(folders, name):
    environment, _, swap = folders
    (swap / name).mkdir()
    with tempfile.TemporaryDirectory(prefix="fb") as short:  # a socket's path is 107 bytes at most
        runtime = pathlib.Path(short) / name
        runtime.mkdir()
        environment = {**environment, "XDG_RUNTIME_DIR": str(runtime)}
        done = forebay(*run_flags(swap / name), FOREBAY, "status", "--json", env=environment)
        runtime.rmdir()  # fails unless the folder is empty
    (swap / name).rmdir()
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["socket_path"].startswith(str(runtime))
    assert status["swap"][0]["path"].startswith(str(swap / name))


def test_health_names_a_swap_path_whose_reads_failed(folders):
    environment, _, swap = folders
    settings = "--set swap.life=kept --set update.block_elems=4096 --set update.workers=2 --set dram.limit=7600KiB"
    train = f'"{FOREBAY.parent.parent}/tests/held_client" "$FOREBAY_SOCKET" 0 1 step {os.geteuid()}'
    views = f'"{FOREBAY}" swap; "{FOREBAY}" jobs'
    script = f'{train} one; {train} two; {views}; echo ===; truncate -s 0 "{swap}"/*/forebay.swap; {train} two; {views}'
    flags = [*run_flags(swap)[:-1], *settings.split(), "--"]
    done = forebay(*flags, "sh", "-c", script, env=environment)
    before, after = (text.splitlines() for text in done.stdout.split("===\n"))
    assert [line.split()[-1] for line in before if "/forebay-run-" in line] == ["ok"]
    assert [line.split()[-1] for line in before if line.startswith(("one", "two"))] == ["ok"] * 2
    assert any(line.split()[3:7] == ["STEP", "DURABILITY", "DURABLE", "STEP"] for line in before)
    assert [line.split()[3:6] for line in before if line.startswith("two")] == [["1", "memory", "-"]]
    assert any(re.search(r"(\d+) requests? failed, \1 of them reads: see the log$", line) for line in after)
    health = {line.split()[0]: line for line in after if line.startswith(("one", "two"))}
    of_the_path = rf" has blocks on swap; {swap}/\S+ had \d+ failed reads? since the daemon started$"
    assert re.search(of_the_path, health["one"]), done.stdout
    assert not any(line.startswith("hint: ") for line in after), "a job has one line"
    assert not health["two"].endswith("ok")  # refused before the decision or failed after it


def test_deleting_a_job_without_a_name_is_an_error(folders):
    environment, _, swap = folders
    done = forebay(*run_flags(swap), FOREBAY, "jobs", "--delete", "", env=environment)
    assert done.returncode == 1 and "error[E_JOB_NAME]" in done.stderr


def test_an_unknown_key_is_named_with_file_and_line(folders, tmp_path):
    environment, _, _ = folders
    config = tmp_path / "forebay.toml"
    config.write_text('[dram]\n\nlimmit = "1GiB"\n', encoding="utf-8")
    done = forebay("run", "--config", config, "--", "true", env=environment)
    assert done.returncode == 1
    assert f"error[E_CONFIG]: {config}:3: unknown key dram.limmit" in done.stderr
    assert "hint: did you mean dram.limit?" in done.stderr
    config.write_text('[dram]\n\nlimit = "1GiB"\n', encoding="utf-8")
    trains(environment, "--config", config)


def test_doctor_judges_everything_once():
    findings = json.loads(forebay("doctor", "--json", ROOT / "build").stdout)
    whats = [finding["what"].split(" /")[0] for finding in findings]
    assert whats == ["memlock", "io_uring", "pidfd", "huge pages", "CPU target", "O_DIRECT", "disk"]
    assert all(finding["result"] in ("PASS", "WARN", "FAIL") for finding in findings)
    assert all(finding["fix"] for finding in findings if finding["result"] != "PASS")
    assert forebay("doctor", "/does/not/exist").returncode == 1


def test_the_environment_forces_an_instruction_set(folders):
    environment, _, _ = folders

    def seen(target):
        done = forebay("doctor", "--json", env={**environment, "FOREBAY_CPU_TARGET": target})
        assert done.returncode == 0, done.stderr
        findings = json.loads(done.stdout)
        used, _, all_ = next(f["seen"] for f in findings if f["what"] == "CPU target").partition(
            " of "
        )
        return used, all_.split(", ")

    best, targets = seen("")
    assert best == targets[0] and targets[-1] == "scalar"
    assert [seen(target) for target in targets] == [(target, targets) for target in targets]

    def served(target, *settings):
        flags = ["run", "--dram", "256MiB", *settings, "--", FOREBAY, "status", "--json"]
        done = forebay(*flags, env={**environment, "FOREBAY_CPU_TARGET": target})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["adam_target"]

    assert [served(target) for target in ["", *targets]] == [best, *targets]
    assert served(best, "--set", "update.target=scalar") == "scalar"
    for program in (FOREBAY, FOREBAY.parent / "forebayd"):
        refused = subprocess.run(
            [program, "doctor"] if program == FOREBAY else [program, "--check"],
            env={**environment, "FOREBAY_CPU_TARGET": "mmx"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert refused.returncode == 1
        assert 'error[E_OPTION]: instruction set "mmx" is not one of' in refused.stderr
        assert ", ".join(targets) in refused.stderr


def test_bench_adam_runs_each_case_and_shows_its_four_limits(folders):
    environment, _, _ = folders
    names = forebay("bench", "adam", "--list", "--params", 100_000).stdout.splitlines()
    assert len(names) == len(set(names)) and names
    assert "adam/opt=adamw/format=exact/grad=bf16/param=bf16/place=inplace/threads=1/shape=flat" in names
    flags = ["adam", "--params", 100_000, "--samples", 1]
    done = forebay("bench", *flags, "--json", env={**environment, "FOREBAY_CPU_TARGET": ""})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == names
    for line in lines:
        assert list(line)[: len(BENCH_KEYS)] == BENCH_KEYS
        loops = [line[f"{store}_{pages}"] for store in ("plain", "non_temporal") for pages in ("2mib", "4kib")]
        loops += [line[key] for key in line if key.endswith("_2mib_interleaved")]
        assert line["value"] > 0 and line["limit"] == max(loops) and min(loops) > 0
        assert line["bytes_read"] > 0 and 0 <= line["huge_share"] <= 1
        assert ("unhashed" in line) == ("hash=on" in line["case"])

    scalar = forebay(
        "bench", *flags, "--case", "opt=lion", env={**environment, "FOREBAY_CPU_TARGET": "scalar"}
    )
    assert scalar.returncode == 0 and "/shape=flat/target=scalar" in scalar.stdout
    assert forebay("bench", "adam", "--list", "--case", "no such").returncode == 1
    assert forebay("bench", "adam", "--params", 1024).returncode == 1
    assert forebay("bench", "disk", "--list").returncode == 1


DISK_CASES = [f"disk/op={op}/block=8MiB/pages=2MiB" for op in ("read", "write", "mixed")]
STUB_OF_FIO = """#!/bin/sh
for flag in "$@"; do
  case "$flag" in
    --output=*) report="${flag#--output=}" ;;
    --rw=*) echo "$flag" >> "${0%/*}/calls" ;;
  esac
done
echo '{"jobs": [{"read": {"bw_bytes": 6e15}, "write": {"bw_bytes": 1e15}}]}' > "$report"
"""


def test_bench_disk_shows_the_daemons_transfers_beside_the_better_of_two_limits(folders, tmp_path):
    environment, _, swap = folders
    flags = ["disk", "--samples", 1, "--params", 4 << 20, "--swap", swap, "--json"]
    done = forebay("bench", *flags, env={**environment, "PATH": ""})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == DISK_CASES
    for line, (reads, writes) in zip(lines, ((1, 0), (0, 1), (1, 1)), strict=True):
        assert list(line)[: len(BENCH_KEYS)] == BENCH_KEYS
        assert line["value"] > 0 and line["limit"] == line["bare"] > 0 and "fio" not in line
        assert line["limit_what"] == "bare loop; fio is not installed"
        assert line["bytes_read"] == reads * (32 << 20)
        assert line["bytes_written"] == writes * (32 << 20)
        assert 0 <= line["huge_share"] <= 1 and line["cpu_s_per_gb"] > 0

    stub = tmp_path / "fio"
    stub.write_text(STUB_OF_FIO)
    stub.chmod(0o755)
    done = forebay("bench", *flags, env={**environment, "PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    for line in map(json.loads, done.stdout.splitlines()):
        assert line["limit"] == line["fio"] == 7e6 and line["bare"] > 0
        assert line["limit_what"] == "the better of a bare loop and fio"
    calls = (tmp_path / "calls").read_text().split()
    assert calls == ["--rw=write", *["--rw=read"] * 2, *["--rw=write"] * 2, *["--rw=rw"] * 2]
    assert not list(pathlib.Path(swap).iterdir())

    stub.write_text("#!/bin/sh\nexit 3\n")
    done = forebay("bench", *flags, env={**environment, "PATH": str(tmp_path)})
    assert done.returncode == 1 and "fio" in done.stderr and "exit status 3" in done.stderr


def test_bench_step_shows_what_updates_under_compute_hide(folders):
    environment, _, swap = folders
    flags = ["--samples", 1, "--params", 4 << 20, "--compute-ms", 50, "--swap", swap, "--json"]
    done = forebay("bench", "step", *flags, deadline_s=300, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == [
        f"step/place=nvme/early={early}/drain={drain}"
        for early in ("yes", "no")
        for drain in ("yes", "no")
    ]
    for line in lines:
        assert list(line)[: len(BENCH_KEYS)] == BENCH_KEYS
        assert line["compute_s"] == 0.05 and line["update_s"] > 0
        assert line["limit"] == max(line["compute_s"], line["update_s"])
        assert line["value"] > 0.05, "the timers at least"
    assert forebay("bench", "disk", "--compute-ms", 50).returncode == 1


def test_bench_step_limits_the_rate_of_swap(folders):
    environment, _, swap = folders
    flags = ["--samples", 1, "--params", 4 << 20, "--limit-rate", "512MiB", "--swap", swap, "--json"]
    done = forebay("bench", "step", *flags, deadline_s=300, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert line["case"].endswith("/rate=512MiB")
        assert line["update_s"] == 0.125, "64 MiB at the rate"
        assert line["limit"] == line["compute_s"] >= 0.125
    refused = forebay("bench", "step", "--limit-rate", "fast", env=environment)
    assert refused.returncode == 1 and "--limit-rate fast is no size" in refused.stderr
    for rates in ("1GiB,0", "1GiB,", ","):
        refused = forebay("bench", "step", "--limit-rate", rates, env=environment)
        assert refused.returncode == 1 and f"--limit-rate {rates} is no size" in refused.stderr


def test_bench_copies_measures_each_way_and_direction_on_a_driver():
    driver = FOREBAY.parents[1] / "tests" / "libfake_cuda.so"
    done = forebay(
        *("bench", "copies", "--driver", driver, "--params", 1 << 20, "--samples", 1, "--json")
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == [
        f"copies/{what}/pages={pages}"
        for pages in ("4KiB", "2MiB")
        for what in (
            *("register/way=read_only", "register/way=made_read_only"),
            *("dir=to_device", "dir=from_device", "dir=both"),
        )
    ]
    for line in lines:
        assert line["value"] > 0 and line["limit"] > 0
        assert line["case"].endswith("2MiB") or line["huge_page_share"] == 0


def test_bench_copies_without_a_driver_says_so():
    done = forebay("bench", "copies", "--driver", "libcuda-that-is-nowhere.so.1")
    assert done.returncode == 1 and "error[E_UNSUPPORTED]: no CUDA on this machine" in done.stderr
    assert forebay("bench", "disk", "--driver", "libcuda.so.1").returncode == 1


def test_bench_swap_is_disk_and_says_so(folders):
    environment, _, swap = folders
    flags = ["--samples", 1, "--params", 1 << 20, "--swap", swap, "--json"]
    done = forebay("bench", "swap", *flags, env={**environment, "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["case"] for line in done.stdout.splitlines()] == DISK_CASES
    assert done.stderr.startswith("note: bench swap is now called disk")
    assert forebay("bench", "disk", *flags, env={**environment, "PATH": ""}).stderr == ""


def test_an_unknown_bench_is_refused_with_the_known_ones():
    done = forebay("bench", "nonsense")
    assert done.returncode == 1 and "hint: one of: adam, copies, disk, step\n" in done.stderr


@pytest.mark.parametrize(
    "words", ["cluster --nodes 4 --gpus 2 --staging 64MiB", "commit", "fetch --samples 1", "pipeline", "update"]
)
def test_a_bench_of_the_source_tree_is_refused_with_the_program_that_has_it(words):
    done = forebay("bench", *words.split())
    name = words.split()[0]
    assert done.returncode == 1 and done.stdout == ""
    assert f"error[E_OPTION]: `forebay bench` has no {name}: `forebay-bench {name}` has it\n" in done.stderr
    assert f"build/bin/forebay-bench {name}" in done.stderr.splitlines()[1]
