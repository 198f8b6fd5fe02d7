"""The warm-up: after it a first request compiles nothing, whatever it is; and what it reports."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.session import Session
from lse_mlx.drafters.base import Drafter
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.errors import DraftError, KernelError
from lse_mlx.kernels.registry import Registry
from lse_mlx.target.loading import load_target
from lse_mlx.target.model import Target
from lse_mlx.warmup import CPU_REPLY_TOKENS, FEW_TESTED, warm_up
from tests.decode.runs import run
from tests.dice_pair import Heard, dice, on_device, save_pair
from tests.kernels.modes import needs_compiler, own_registry
from tests.metal_host.host import MetalHost
from tests.tiny_models import VOCAB, load_tiny, on_cpu, random_prompt

PROMPT = random_prompt(12)


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


def compiled_by_requests(target: Target, drafter: Drafter | None) -> int:
    """New variants in prompts of all lengths, greedy and sampled, plain and speculating, and in the
    turns after them."""
    before = target.registry.counts()
    for number, length in enumerate((1, 2, 7, 8, 9, 40)):
        options: dict[str, Any] = {
            "sampling": Sampling(0.8, top_p=0.9) if number % 2 else Sampling(),
            "speculate": number % 3 < 2,
        }
        session = Session(target, drafter)
        reply = run(session, random_prompt(length), max_tokens=9, seed=length, **options)
        again = [*session.tokens, *reply.tokens[-1:], *random_prompt(1 + length % 12, 3)]
        run(session, again, max_tokens=4, **options)
    return target.registry.counts().since(before).jit_compiles


@pytest.mark.parametrize(
    ("kind", "mode", "exact"),
    [("q4", "own", False), ("mixed", "auto", False), ("tied", "auto", True)],
)
def test_after_a_warm_up_no_request_compiles_anything(folders, kind: str, mode: str, exact: bool):
    target, drafter = on_device(folders, dice(mode, exact), kind)
    report = warm_up(target, drafter, PROMPT)
    assert report.compilations
    assert compiled_by_requests(target, drafter) == 0


def test_without_a_warm_up_requests_compile(folders):
    target, drafter = on_device(folders, dice())
    assert compiled_by_requests(target, drafter) > 0


def test_a_target_alone_is_warmed_up_too(folders):
    target, _ = on_device(folders, dice())
    report = warm_up(target, None, PROMPT)
    assert (report.tested, report.accepted) == (0, 0)
    assert compiled_by_requests(target, None) == 0


def test_a_short_context_is_kept_to(folders):
    for length in (2, 3, 9, 24):
        target = load_target(folders / "q4", length, on_host=False, registry=dice())
        warm_up(target, None, PROMPT)


def real_kernels() -> Registry:
    """The project's kernels, run by the harness."""
    return own_registry(MetalHost().metal_kernel)


@needs_compiler
def test_a_first_request_compiles_nothing(folders):
    """With real kernels. For the time it takes, the context is short, and the target's weights are
    floats, so that all products in codes are the drafter's."""
    target, drafter = on_device(folders, real_kernels(), "tied", context_length=11)
    report = warm_up(target, drafter, PROMPT)
    assert {compilation.name for compilation in report.compilations} > {
        "gated_delta_verify",
        "verify_attention",
        "skinny_qmm",
        "sliding_attention",
        "selector",
    }
    before = target.registry.counts()
    reply = run(Session(target, drafter), random_prompt(6), max_tokens=4)
    counts = target.registry.counts().since(before)
    assert len(reply.tokens) == 4
    assert counts.jit_compiles == 0
    assert counts.device_kernel_calls > 0
    assert counts.reference_calls == 0


@pytest.mark.slow
@needs_compiler
def test_no_request_compiles_anything_with_real_kernels(folders):
    """Several requests, and the first of them once without a warm-up."""
    cold_target, cold_drafter = on_device(folders, real_kernels(), context_length=24)
    cold = run(Session(cold_target, cold_drafter), PROMPT, max_tokens=12)
    assert cold_target.registry.counts().jit_compiles > 5

    target, drafter = on_device(folders, real_kernels(), context_length=24)
    warm_up(target, drafter, PROMPT)
    before = target.registry.counts()
    assert before.reference_calls == 0
    first = run(Session(target, drafter), PROMPT, max_tokens=12)
    for length, sampling in ((3, Sampling()), (15, Sampling(1.0))):
        run(Session(target, drafter), random_prompt(length), max_tokens=8, sampling=sampling)
    run(Session(target, None), PROMPT, max_tokens=5)
    counts = target.registry.counts().since(before)
    assert counts.jit_compiles == 0
    assert counts.device_kernel_calls > 0
    assert counts.reference_calls == 0
    assert first.tokens == cold.tokens, "a warm-up leaves nothing behind"


def test_the_report_lists_kernels_variants_forms_and_times(folders):
    target, drafter = on_device(folders, dice())
    shown = json.loads(json.dumps(warm_up(target, drafter, PROMPT).as_dict()))
    kernels = {kernel["name"]: kernel for kernel in shown["kernels"]}
    for name in ("gated_delta_verify", "selector", "skinny_qmm", "topk_chunk", "dynamic_conv"):
        assert kernels[name]["calls"].keys() == {"metal"}
        assert kernels[name]["variants"]
    variants = [v for kernel in shown["kernels"] for v in kernel["variants"]]
    assert shown["jit_compiles"] == len(variants) == len(target.registry.compilations)
    assert shown["jit_compile_ms"] == pytest.approx(sum(v["compile_ms"] for v in variants))
    assert shown["forms"]["topk 7x97 float32, 5"] == "chunks"
    assert any(shape.startswith("skinny_qmm 1x64x") for shape in shown["forms"])
    assert (shown["form"], shown["mode"], shown["exact"]) == ("metal", "own", False)
    assert shown["races"] == []
    assert shown["refused"] == {}


def test_kernels_that_do_not_run_are_said_once_and_plain_mlx_serves(folders):
    heard = Heard()
    registry = dice(refusing=("selector", "skinny_qmm"))
    target, drafter = on_device(folders, registry)
    report = warm_up(target, drafter, PROMPT, progress=heard)
    assert report.refused.keys() == report.as_dict()["refused"].keys() == {"selector", "skinny_qmm"}
    told = [note for note in heard.notes if note.startswith("plain MLX serves")]
    assert len(told) == 2
    for name in ("selector", "skinny_qmm"):
        [note] = [note for note in told if f"serves {name}" in note]
        assert "threadgroup too large" in note and "lse-mlx selftest --json" in note
        assert report.calls[name].keys() == {"reference"}
    before = registry.counts()
    run(Session(target, drafter), PROMPT, max_tokens=5)
    counts = registry.counts().since(before)
    assert counts.jit_compiles == 0
    assert counts.reference_calls > 0 and counts.device_kernel_calls > 0


def test_a_required_kernel_that_does_not_run_is_an_error(folders):
    registry = dice(refusing=("skinny_qmm",))
    registry.required = True
    with pytest.raises(KernelError, match="skinny_qmm does not run on this device"):
        on_device(folders, registry)


def test_progress_counts_from_nothing_to_the_end(folders):
    heard = Heard()
    target, drafter = on_device(folders, dice())
    warm_up(target, drafter, PROMPT, progress=heard)
    total = heard.steps[0][2]
    assert heard.steps == [("warm-up", done, total) for done in range(total + 1)]


@pytest.fixture(scope="module")
def target(folders: Path) -> Target:
    return load_tiny(folders / "q4")


def drafting(target: Target, right: int) -> ScriptedDrafter:
    """A drafter that knows the reply to PROMPT, and drafts its first `right` tokens right."""
    known = run(Session(target, None), PROMPT, max_tokens=80).tokens
    return ScriptedDrafter.right_for([*PROMPT, *known], right, VOCAB)


def test_a_drafter_that_is_never_right_is_named_with_the_target(target: Target):
    heard = Heard()
    names = ("./some-target", "./some-drafter")
    report = warm_up(target, drafting(target, 0), PROMPT, names=names, progress=heard)
    assert report.accepted == 0
    assert report.tested >= FEW_TESTED
    [note] = heard.notes
    assert "./some-target" in note and "./some-drafter" in note
    assert f"of {report.tested} tokens" in note
    assert "decode without a drafter" in note


def test_a_drafter_that_is_right_is_not_spoken_of(target: Target):
    heard = Heard()
    report = warm_up(target, drafting(target, 7), PROMPT, progress=heard)
    assert report.accepted == report.tested > FEW_TESTED
    assert heard.notes == []


def test_a_drafter_that_fails_is_named_and_may_be_refused(target: Target):
    heard = Heard()
    failing = ScriptedDrafter.listed([[1, 2]])
    report = warm_up(target, failing, PROMPT, names=("a", "./some-drafter"), progress=heard)
    [note] = heard.notes
    assert "./some-drafter failed (Draft 1 at position" in note
    assert report.tested == 0
    with pytest.raises(DraftError, match="Draft 1"):
        warm_up(target, failing, PROMPT, strict_draft=True)


def test_on_a_device_the_target_is_warmed_up_without_a_drafter_that_fails(folders):
    target, _ = on_device(folders, dice())
    heard = Heard()
    warm_up(target, ScriptedDrafter.listed([]), PROMPT, progress=heard)
    assert len([note for note in heard.notes if "drafter failed" in note]) == 1
    assert compiled_by_requests(target, None) == 0


def test_on_a_cpu_a_target_alone_has_nothing_to_warm_up(target: Target):
    heard = Heard()
    before = target.registry.counts()
    report = warm_up(target, None, PROMPT, races=Path("/nowhere"), progress=heard)
    assert (heard.steps, heard.notes) == ([], [])
    assert (report.form, report.races, report.compilations) == ("reference", (), ())
    assert target.registry.counts() == before


def test_on_a_cpu_nothing_is_run_but_one_reply_with_the_drafter(target: Target):
    heard = Heard()
    drafter = drafting(target, 7)
    before = target.registry.counts()
    report = warm_up(target, drafter, PROMPT, races=Path("/nowhere"), progress=heard)
    counts = target.registry.counts().since(before)
    assert (heard.steps, heard.notes) == ([], [])
    assert (report.form, report.races, report.compilations) == ("reference", (), ())
    before = target.registry.counts()
    run(Session(target, drafter), PROMPT, max_tokens=CPU_REPLY_TOKENS)
    assert target.registry.counts().since(before) == counts
