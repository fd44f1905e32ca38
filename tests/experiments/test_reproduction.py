"""The report on all experiments: what runs, what is kept, what a claim's verdict is."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from experiments.costs import length_shapes, tail_latency
from experiments.kernels import latency
from experiments.lib.claims import Claim, chosen, rising, within
from experiments.lib.reporting import git_commit
from experiments.paper import (
    fig02_memory_waste,
    fig12_throughput,
    fig13_batched_requests,
    fig15_memory_sharing,
    fig19_preemption,
    report,
)
from experiments.paper.reproduce import (
    HIT_RATE,
    STEPS,
    Config,
    Step,
    chosen_steps,
    kept_outcome,
    last_line,
    run_command,
)
from experiments.paper.setups import ORCA

ROOT = Path(__file__).resolve().parents[2]


def module_of(step: Step) -> ModuleType:
    return importlib.import_module(f"experiments.{step.module}")


# Claims


def test_rows_are_chosen_by_values_and_texts_by_their_beginning():
    rows = [{"lengths": "sharegpt_served", "n": 1}, {"lengths": "alpaca", "n": 1}]
    assert chosen(rows, lengths="sharegpt", n=1) == rows[:1]
    assert chosen(rows, n=2) == []
    assert chosen(rows, lengths="alp") == []


def test_orders_and_tolerances():
    assert rising([1, 2, 3])
    assert not rising([1, 2, 2])
    assert not rising([1, None, 3])
    assert within(11.4, 10, 15)
    assert not within(11.6, 10, 15)
    assert within(8.6, 10, 15)


@pytest.mark.parametrize(
    ("holds", "verdict"), [(True, "reproduced"), (False, "differs"), (None, "not comparable")]
)
def test_a_verdict_is_one_of_three(holds, verdict):
    assert Claim("", "", "", "", holds).verdict == verdict
    assert verdict in report.VERDICTS


def throughput_results(oracle: float, large: float = 1.2) -> dict:
    def row(model, lengths, system, rate, gain):
        return {
            "model": model, "lengths": lengths, "system": system, "rate": rate, "gain": gain,
            "batch_size": 9.0,
        }  # fmt: skip

    systems = ("faster_transformer", "orca_max", "orca_pow2", "orca_oracle", "paged")
    gains = (9.0, 3.0, 2.2, oracle, 1.0)
    cases = [
        row("OPT-13B", lengths, system, 1 / gain, gain)
        for lengths in ("sharegpt_served", "alpaca")
        for system, gain in zip(systems, gains, strict=True)
    ]
    return {"cases": [*cases, row("OPT-175B", "alpaca", "orca_oracle", 1.0, large)]}


def test_a_gain_counts_from_the_papers_lower_end():
    def verdicts(oracle):
        claims = fig12_throughput.claims(throughput_results(oracle))
        return [c.verdict for c in claims if "Oracle" in c.what and "over" in c.what]

    assert verdicts(1.71) == ["reproduced"]
    assert verdicts(1.69) == ["differs"]


def test_the_order_of_systems_and_the_larger_model_are_judged():
    claims = list(fig12_throughput.claims(throughput_results(1.8)))
    assert all(claim.holds for claim in claims), [c for c in claims if not c.holds]
    claims = fig12_throughput.claims(throughput_results(2.3, large=2.5))
    wrong = [claim.what for claim in claims if not claim.holds]
    assert wrong == [
        "OPT-13B, sharegpt: order of the systems' rates",
        "OPT-13B, alpaca: order of the systems' rates",
        "Alpaca: paging gains less on OPT-175B, which is bound by arithmetic",
    ]


def test_memory_is_judged_for_each_kind_of_lengths_on_its_own():
    def row(lengths: str, system: str, tokens: float, off: float) -> dict:
        return {
            "run": "simulated", "lengths": lengths, "system": system, "token_states": tokens,
            "reserved": 1.0, "internal": 2.0, "external": 3.0, "off_points": off,
            "used_as_tokens": tokens,
        }  # fmt: skip

    paper = {name: [20.0, 1.0, 2.0, 3.0] for name in ORCA}
    cases = [
        row("sharegpt_served", "orca_max", 20.0, 4.9),
        row("sharegpt_served", "paged", 97.0, 0.7),
        row("sharegpt", "orca_max", 15.0, 5.1),
        row("sharegpt", "paged", 95.0, 1.3),
    ]
    line = "simulated, sharegpt, orca_max: 5.1 points off: short"
    results = {"cases": cases, "paper_percent": paper, "explanations": [line]}
    claims = list(fig02_memory_waste.claims(results))
    assert [claim.holds for claim in claims] == [True, True, True, False, False, True]
    assert [claim.note for claim in claims if claim.note] == [line]


def test_batch_sizes_have_the_tolerance_of_their_system():
    def verdict(system: str, size: float) -> str:
        row = {
            "lengths": "sharegpt_served", "rate": 2.0, "system": system, "batch_size": size,
            "paper": 10.0, "unfinished_percent": 3.0,
        }  # fmt: skip
        [claim] = fig13_batched_requests.claims({"cases": [row]})
        return claim.verdict

    assert verdict("orca_max", 11.4) == verdict("paged", 12.4) == "reproduced"
    assert verdict("orca_max", 8.4) == verdict("paged", 7.4) == "differs"


def test_saved_blocks_are_judged_by_points():
    def verdict(ours: float, paper: str) -> str:
        row = {"lengths": "alpaca", "method": "beam", "width": 2, "opt_13b": ours, "paper": paper}
        [claim] = fig15_memory_sharing.claims({"cases": [row]})
        return claim.verdict

    assert verdict(42.0, "37.6") == verdict(12.0, "16.2 to 30.5") == "reproduced"
    assert verdict(43.0, "37.6") == verdict(36.0, "16.2 to 30.5") == "differs"


def test_a_kernel_on_a_cpu_says_nothing_of_the_papers():
    row = {"ratio": 1.1, "block_size": 16, "batch": 8, "context": 64}
    results = {"cases": [row], "paper_ratio": [1.2, 1.26]}

    def verdict(platform: str) -> str:
        environment = {"device_kind": platform, "device_platform": platform}
        [claim] = latency.claims(results | {"environment": environment})
        return claim.verdict

    assert verdict("cpu") == "not comparable"
    assert verdict("gpu") == "reproduced"


def preemption_results() -> dict:
    def case(size: int, each: float, recompute: float) -> dict:
        return {
            "block_size": size, "a100_each_ms": each, "a100_recompute_ms": 50.0,
            "recompute_ms": recompute,
        }  # fmt: skip

    return {"cases": [case(256, 45.0, 10.0), case(1, 400.0, 11.0), case(16, 60.0, 10.0)]}


def test_swapping_and_recomputing_are_judged_by_what_is_measured_and_modelled():
    results = preemption_results()
    assert [claim.holds for claim in fig19_preemption.claims(results)] == [True] * 4
    results["cases"][1]["recompute_ms"] = 13.0
    results["cases"][0]["a100_each_ms"] = 20.0
    results["cases"][2]["a100_each_ms"] = 20.0
    holds = [claim.holds for claim in fig19_preemption.claims(results)]
    assert holds == [True, False, False, False]


def test_uniform_lengths_must_show_a_shorter_tail():
    def verdict(uniform: float, lognormal: float) -> str:
        rows = [
            {"shape": shape, "system": "paged", "internal": 1.0, "external": 2.0, "ttft_p99_s": p99}
            for shape, p99 in (("constant", 0.1), ("uniform", uniform), ("lognormal", lognormal))
        ]
        [claim] = length_shapes.claims({"cases": rows})
        return claim.verdict

    assert verdict(1.0, 1.2) == "reproduced"
    assert verdict(1.0, 1.05) == "differs"


def test_chunks_must_shorten_the_longest_gaps_at_every_rate():
    def verdicts(*ratios: float | None) -> list[str]:
        rows = [{"rate": 1.0, "ratio": ratio} for ratio in ratios]
        return [c.verdict for c in tail_latency.claims({"gap_p99_ratios": rows})]

    assert verdicts(0.3, None, 0.9) == ["reproduced"]
    assert verdicts(0.3, 1.1) == ["differs"]
    assert verdicts(None) == []


# Plan


def test_every_experiment_of_the_plan_has_a_quick_way_and_claims_of_its_own():
    names = [step.name for step in (*STEPS, HIT_RATE)]
    assert len(names) == len(set(names))
    assert all(callable(module_of(step).claims) for step in (*STEPS, HIT_RATE))
    for step in chosen_steps(["throughput", "capacity"], None):
        quick = step.command(Config(quick=True, out_dir="somewhere"))
        full = step.command(Config(out_dir="somewhere"))
        assert "--quick" in quick
        assert "--quick" not in full
        assert full[-1] == f"--out_dir=somewhere/{step.name}"
    assert "--seed=3" in step.command(Config(seed=3, out_dir="somewhere"))


@pytest.mark.parametrize("step", [*STEPS, HIT_RATE], ids=lambda step: step.name)
def test_the_flags_of_a_step_are_those_of_its_experiment(step):
    module = module_of(step)
    classes = [value for value in vars(module).values() if dataclasses.is_dataclass(value)]
    known = {field.name for each in classes for field in dataclasses.fields(each)}
    given = [re.match(r"--(\w+)", flag)[1] for flag in f"{step.quick} {step.full}".split()]
    assert set(given) <= known


def test_a_trace_adds_its_experiment_and_unknown_names_are_refused():
    assert HIT_RATE not in chosen_steps([], None)
    last = chosen_steps([], "x.jsonl")[-1]
    assert last.module == HIT_RATE.module
    assert "--trace=x.jsonl" in last.command(Config(out_dir="somewhere"))
    with pytest.raises(ValueError, match="no experiment troughput; there are capacity"):
        chosen_steps(["troughput"], None)


# Running and keeping


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_what_succeeded_is_kept_for_the_same_command_and_commit(tmp_path):
    command = script("print('working'); print('done')")
    shown: list[str] = []
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "results.json").write_text("{}")
    outcome = run_command(command, folder, "abc", shown.append)
    assert outcome.succeeded
    assert outcome.last_line == "done"
    kept = kept_outcome(folder, command, "abc")
    assert kept is not None
    assert kept.was_kept
    assert kept_outcome(folder, command, "abd") is None
    assert kept_outcome(folder, [*command, "--quick"], "abc") is None
    (folder / "results.json").unlink()
    assert kept_outcome(folder, command, "abc") is None


def test_what_failed_is_not_kept_and_its_last_words_are(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    command = script("print('50 %\\r100 %'); raise SystemExit('error: no such thing')")
    outcome = run_command(command, tmp_path, None, lambda _: None)
    assert (outcome.returncode, outcome.last_line) == (1, "error: no such thing")
    assert kept_outcome(tmp_path, command, None) is None


def test_the_last_line_of_a_progress_bar_is_its_last_state(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"x" * 9000 + b"\nfirst\r 10 %\r 20 %\n\n")
    assert last_line(log) == "20 %"
    log.write_bytes(b"")
    assert last_line(log) == ""


# The report


@pytest.fixture
def sections(tmp_path) -> list[report.Section]:
    folder = tmp_path / "throughput"
    folder.mkdir()
    (folder / "throughput.png").write_bytes(b"\x89PNG of <rates>")
    claims = [
        Claim("a < b", "2", "3", "at least 2", True, "unneeded"),
        Claim("c", "2", "1", "at least 2", False, "because of <d>"),
    ]
    command = "python -m experiments.paper.fig12_throughput"
    failure = "exit code 2: error: no <model>"
    return [
        report.Section("throughput", "Rates & more", "", folder, command, "12 s", None, claims),
        report.Section("chatbot", "Chat", "", tmp_path, "python", "1 s", failure, []),
    ]


def test_the_html_needs_no_other_file_and_hides_no_failure(sections):
    page = report.html_page("Title", sections, {"jax": "1"})
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("data:image/png;base64,") == 1
    assert "a &lt; b" in page
    assert "because of &lt;d&gt;" in page
    assert "unneeded" not in page
    assert "exit code 2: error: no &lt;model&gt;" in page
    assert '<td class="differs">differs</td>' in page


def test_the_markdown_has_the_same_claims_and_links_to_plots(sections, tmp_path):
    text = report.markdown("Title", sections, {"jax": "1"}, tmp_path)
    assert "![Rates & more](throughput/throughput.png)" in text
    assert "| a < b | 2 | 3 | reproduced | at least 2 |" in text
    assert "Failed: exit code 2" in text
    assert report.summary(sections) == {
        "reproduced": 1,
        "differs": 1,
        "not comparable": 0,
        "experiments that failed": 1,
    }


def test_a_report_from_the_command_line_which_is_kept_the_second_time(tmp_path):
    def reproduce() -> tuple[str, dict]:
        arguments = ["--quick", "--only=decode_step", f"--out_dir={tmp_path}"]
        result = subprocess.run(
            [sys.executable, "-m", "experiments.paper.reproduce", *arguments],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout, json.loads((tmp_path / "results.json").read_text())

    # As an earlier run would have left it: the commit decides whether it is used.
    [step] = chosen_steps(["decode_step"], None)
    folder = tmp_path / "decode_step"
    folder.mkdir()
    (folder / "results.json").write_text('{"cases": [{"ratio": 1.25}, {"ratio": 1.5}]}')
    command = step.command(Config(quick=True, out_dir=str(tmp_path)))
    outcome = {
        "command": command, "commit": git_commit(ROOT / "experiments"), "seconds": 3.0,
        "cpu_seconds": 5.0, "returncode": 0, "last_line": "", "was_kept": False,
    }  # fmt: skip
    (folder / "done.json").write_text(json.dumps(outcome))
    stdout, results = reproduce()
    assert "1.25 to 1.50" in stdout
    assert results["summary"]["not comparable"] == 1
    assert "kept from an earlier run" in (tmp_path / "report.html").read_text()
    assert "1.25 to 1.50" in (tmp_path / "report.md").read_text()
