"""The whole self-test here, on a CPU: what it holds, and that nobody is named in it."""

import getpass
import json
import platform
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lse_mlx.checkpoints.progress import Silent
from lse_mlx.errors import KernelError
from lse_mlx.kernels.options import KernelOptions
from lse_mlx.kernels.race import RaceResult
from lse_mlx.kernels.registry import Registry
from lse_mlx.kernels.winners import WinnersFile, this_device
from lse_mlx.selftest.checks import Outcome
from lse_mlx.selftest.pair import PROMPTS, pair_outcomes, replies
from lse_mlx.selftest.report import SelftestReport, run_selftest
from tests.tiny_models import on_cpu

RACE = RaceResult("topk", "7x97, 5", "chunks", {"stock": 9.0, "chunks": 4.0}, {"chunks": 0.0})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> SelftestReport:
    races = tmp_path_factory.mktemp("races")
    with on_cpu():
        WinnersFile(races, this_device()).write([RACE])
        return run_selftest(races)


def test_nothing_fails_and_what_runs_and_what_does_not_is_said(report: SelftestReport):
    assert report.failed == []
    assert report.form == "reference"
    shown = report.as_dict()
    assert shown["passed"] > 20
    assert shown["not_run"] > 20
    assert shown["failed"] == 0
    assert len(shown["checks"]) == shown["passed"] + shown["not_run"]


def test_the_demo_pair_is_decoded_both_ways(report: SelftestReport):
    pair = [o for o in report.outcomes if o.subject == "demo pair"]
    assert len(pair) == 5
    assert all(o.status == "passed" and o.error == 0 for o in pair)
    assert sum("the same tokens" in o.name for o in pair) == 4
    assert report.warmed["spec_tested"] > 0


def test_versions_device_and_races_are_in_it(report: SelftestReport):
    shown = json.loads(json.dumps(report.as_dict()))
    assert shown["versions"].keys() == {
        "lse-mlx",
        "mlx",
        "mlx-lm",
        "numpy",
        "transformers",
        "python",
    }
    assert shown["device"]["mlx"] == shown["versions"]["mlx"]
    assert shown["races"] == [RACE.as_dict()]
    assert shown["format"] == 1
    assert shown["kernels"]["topk"] == ["topk_chunk", "topk_merge"]
    assert shown["kernels"]["dynamic_conv"] == ["dynamic_conv"]


def names() -> list[str]:
    """Of the person and the machine, where they are no common words."""
    found = [getpass.getuser(), Path.home().name, platform.node(), socket.gethostname()]
    return [name for name in found if len(name) > 4]


def assert_nobody_is_named(text: str):
    assert str(Path.home()) not in text
    assert not re.search(r'"~?/|[\s(]/\w', text)
    assert [name for name in names() if name in text] == []


def test_nobody_and_no_folder_is_named(report: SelftestReport):
    assert_nobody_is_named(json.dumps(report.as_dict()))


def test_nobody_is_named_by_what_a_compiler_or_a_race_says(report: SelftestReport):
    words = f"In file included from {Path.home()}/Library/x.h: /var/folders/ab/c/T/k.metal:3: error"
    refused = RaceResult("topk", "7x97, 5", "stock", {"stock": 9.0}, {}, {"chunks": words})
    failed = Outcome("topk", "a case", "failed", None, 0.0, "", words)
    worse = replace(
        report,
        outcomes=[failed],
        races=[refused.as_dict()],
        warmed={"races": [refused.as_dict()]},
        compilations=[{"name": words, "variant": words, "compile_ms": 1.0}],
    )
    text = json.dumps(worse.as_dict())
    assert "x.h: k.metal:3: error" in text
    assert_nobody_is_named(text)


def test_a_failure_is_counted(report: SelftestReport):
    failed = Outcome("topk", "a case", "failed", 1.0, 0.0, "metal", "the error is above its limit")
    worse = replace(report, outcomes=[*report.outcomes, failed])
    assert worse.failed == [failed]
    assert worse.as_dict()["failed"] == 1


def test_a_pair_that_does_not_load_has_failed_and_the_rest_is_reported():
    class Broken(KernelOptions):
        def registry(self) -> Registry:
            raise KernelError("No kernel runs here.")

    outcomes, warmed = pair_outcomes(Broken(), Silent())
    assert [(o.name, o.status, o.why) for o in outcomes] == [
        ("loads", "failed", "No kernel runs here.")
    ]
    assert warmed == {}


def test_a_prompt_that_raises_has_failed_and_the_others_go_on():
    registry = Registry("reference")
    asked: list[str] = []

    def generate(prompt: str, **options: Any) -> SimpleNamespace:
        asked.append(prompt)
        if len(asked) == 1:
            raise RuntimeError("[metal] Out of memory.")
        ids = [1, 2, 3] if options.get("speculate", True) else [1, 2, 4]
        return SimpleNamespace(token_ids=ids, timings={})

    engine: Any = SimpleNamespace(target=SimpleNamespace(registry=registry), generate=generate)
    outcomes = list(replies(engine, Silent()))
    assert [o.status for o in outcomes] == ["failed"] * PROMPTS + ["passed"]
    assert outcomes[0].why == "[metal] Out of memory."
    assert [o.error for o in outcomes[1:PROMPTS]] == [1.0] * (PROMPTS - 1)
    assert len(asked) == 1 + 2 * (PROMPTS - 1)
