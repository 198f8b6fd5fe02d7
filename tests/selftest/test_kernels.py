"""The self-test's checks of kernels: they pass with the project's kernels, and a broken one fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from lse_mlx.errors import KernelError
from lse_mlx.kernels.choices import Choices
from lse_mlx.kernels.registry import Registry
from lse_mlx.selftest.checks import (
    STOCK_OPERATIONS,
    Check,
    Outcome,
    without_names,
    without_paths,
)
from lse_mlx.selftest.contracts import contract_checks, different, pairs_differ
from lse_mlx.selftest.report import kernel_checks, outcomes_of
from lse_mlx.selftest.stock import stock_checks
from lse_mlx.selftest.values import distance, value_checks
from tests.kernels.modes import needs_compiler, own_registry
from tests.metal_host.host import MetalHost
from tests.tiny_models import on_cpu

KERNELS = {
    "dynamic_conv",
    "gated_delta_verify",
    "selector",
    "skinny_qmm",
    "sliding_attention",
    "topk",
    "verify_attention",
}


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


def summary(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.status}: {o.subject}, {o.name}: {o.error} {o.why}" for o in outcomes]


class Heard:
    """Progress that is kept."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.names: list[str] = []

    def note(self, text: str) -> None:
        raise AssertionError(text)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        self.steps.append((phase, done, total))
        self.names.append(tensor)


def test_on_a_cpu_references_run_and_kernels_are_named_as_not_run():
    heard, registry = Heard(), Registry("reference")
    outcomes = outcomes_of(kernel_checks(registry), registry, heard)
    total = len(heard.steps) - 1
    assert heard.steps == [("checks", done, total) for done in range(total + 1)]
    assert {o.subject for o in outcomes} == {name.split(", ")[0] for name in heard.names[:-1]}
    ran = [o for o in outcomes if o.status != "not run"]
    assert all(o.status == "passed" for o in ran), summary(ran)
    assert {(o.subject, o.served) for o in ran} == {
        (STOCK_OPERATIONS, "stock"),
        *((kernel, "reference") for kernel in KERNELS),
    }
    idle = [o for o in outcomes if o.status == "not run"]
    assert {o.subject for o in idle} == KERNELS
    assert {o.why for o in idle} == {"no device kernels run here"}


@needs_compiler
def test_every_check_passes_with_the_kernels_of_the_project():
    registry = own_registry(MetalHost().metal_kernel)
    outcomes = outcomes_of(kernel_checks(registry), registry)
    assert [o.status for o in outcomes] == ["passed"] * len(outcomes), summary(outcomes)
    by_kernels = [o for o in outcomes if o.served == "metal"]
    assert {o.subject for o in by_kernels} == KERNELS
    assert {o.subject for o in outcomes if o.served == "reference"} == KERNELS
    forms = {o.name.rpartition(", ")[2] for o in by_kernels if o.subject == "skinny_qmm"}
    assert forms == {"simd", "matrix"}


def mutated(kernel: str, change: Callable[[str], str]) -> Registry:
    """A registry whose kernel `kernel` has another text."""
    host = MetalHost()

    def build(*, name: str, source: str, **rest: Any) -> Callable[..., list[mx.array]]:
        if name == kernel:
            assert change(source) != source
            source = change(source)
        return host.metal_kernel(name=name, source=source, **rest)

    return own_registry(build)


@needs_compiler
def test_a_kernel_with_a_wrong_number_fails_and_no_other_does():
    """The convolution's results are off by a thousandth when they are written."""
    registry = mutated("dynamic_conv", lambda text: text.replace("= sum;", "= 1.001f * sum;"))
    outcomes = [
        outcome
        for check in value_checks(registry)
        if check.subject in ("dynamic_conv", "selector")
        for outcome in check.run(registry)
    ]
    failed = [o for o in outcomes if o.status == "failed"]
    assert failed
    assert {o.subject for o in failed} == {"dynamic_conv"}
    assert {o.subject for o in outcomes if o.status == "passed"} >= {"selector"}


SOME = {"dynamic_conv", "gated_delta_verify", "selector"}


def some_checks(registry: Registry) -> list[Check]:
    """Of kernels whose checks are quick."""
    return [check for check in value_checks(registry) if check.subject in SOME]


RAISED = (
    KernelError("The kernel is refused."),
    RuntimeError("[metal::Device] Unable to build metal library from source."),
    ValueError("[metal_kernel] A shape is wrong."),
    TypeError("metal_kernel(): incompatible function arguments."),
    MemoryError("std::bad_alloc"),
)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_kernel_that_mlx_refuses_fails_with_the_reason_and_the_others_go_on(error: Exception):
    def build(*, name: str, **text: Any) -> Callable[..., list[mx.array]]:
        def call(**arguments: Any) -> list[mx.array]:
            if name == "dynamic_conv":
                raise error
            # Nothing is compiled here: what matters is that each kernel is asked for.
            return [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(
                    arguments["output_shapes"], arguments["output_dtypes"], strict=True
                )
            ]

        return call

    registry = Registry("metal", build, Choices("own"), required=True, timed=False)
    outcomes = outcomes_of(some_checks(registry), registry)
    refused = [o for o in outcomes if o.subject == "dynamic_conv" and "reference" not in o.name]
    assert refused
    assert all(o.status == "failed" and str(error) in o.why for o in refused), summary(refused)
    assert all(o.error is None for o in refused)
    others = {o.subject for o in outcomes if o.served == "metal"}
    assert others == {"selector", "gated_delta_verify"}
    of_references = [o for o in outcomes if o.name.endswith(", reference")]
    assert {o.subject for o in of_references} == SOME
    assert all(o.status == "passed" for o in of_references), summary(of_references)


def test_the_compilers_own_words_are_told():
    words = "program_source:31:7: error: use of undeclared identifier 'simd_shuffle_or'"

    def call(**arguments: Any) -> list[mx.array]:
        raise RuntimeError(f"[metal::Device] Unable to build metal library from source. {words}")

    registry = Registry("metal", lambda **text: call, required=True)
    [check, *_] = [c for c in value_checks(registry) if c.subject == "selector"]
    [outcome] = check.run(registry)
    assert outcome.status == "failed"
    assert "kernel selector" in outcome.why and words in outcome.why
    assert outcome.error is None


def test_ctrl_c_ends_it():
    def build(**text: Any) -> Callable[..., list[mx.array]]:
        raise KeyboardInterrupt

    registry = Registry("metal", build, Choices("own"), required=True)
    checks = some_checks(registry)
    with pytest.raises(KeyboardInterrupt):
        outcomes_of(checks, registry)


def nothing(registry: Registry) -> list[mx.array]:
    return []


def outcome_of(
    run: Callable[[Registry], list[mx.array]], registry: Registry, error: float = 0.0
) -> Outcome:
    [outcome] = Check("thing", "a name", run, lambda arrays: error, 1.0).run(registry)
    return outcome


def device() -> Registry:
    return Registry("metal", lambda **text: lambda **call: [])


def served(registry: Registry) -> list[mx.array]:
    registry.served["thing", "metal"] += 1
    return []


def test_a_call_that_the_reference_served_is_no_pass():
    def run(registry: Registry) -> list[mx.array]:
        registry.reference("thing")
        return []

    outcome = outcome_of(run, device())
    assert (outcome.status, outcome.served) == ("failed", "reference")
    assert "its reference or stock MLX was" in outcome.why
    assert outcome_of(nothing, device()).status == "failed"


@pytest.mark.parametrize(
    ("error", "status"),
    [(0.0, "passed"), (1.0, "passed"), (1.1, "failed"), (float("nan"), "failed")],
)
def test_an_error_is_held_to_its_limit(error: float, status: str):
    assert outcome_of(served, device(), error).status == status


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_an_error_that_is_not_finite_is_null_with_the_reason_in_words(error: float):
    outcome = outcome_of(served, device(), error)
    shown = json.loads(json.dumps(outcome.as_dict(), allow_nan=False))
    assert (shown["status"], shown["error"], shown["limit"]) == ("failed", None, 1.0)
    assert shown["why"] == f"the error is not finite ({error})"


def test_a_report_on_kernels_that_give_nan_is_json():
    def answer(*, output_shapes: Any, output_dtypes: Any, **call: Any) -> list[mx.array]:
        pairs = zip(output_shapes, output_dtypes, strict=True)
        return [mx.full(s, 0 if d == mx.int32 else float("nan"), d) for s, d in pairs]

    registry = Registry("metal", lambda **text: answer, Choices("own"), required=True)
    outcomes = outcomes_of(some_checks(registry), registry)
    shown = [outcome.as_dict() for outcome in outcomes]
    json.dumps(shown, allow_nan=False)
    assert any("is not finite" in outcome.why for outcome in outcomes)


def test_a_stock_operation_whose_rows_depend_on_each_other_fails():
    check = Check(
        STOCK_OPERATIONS, "rope", lambda registry: [mx.ones(4), mx.zeros(4)], pairs_differ, 0
    )
    [outcome] = check.run(device())
    assert (outcome.status, outcome.error, outcome.served) == ("failed", 1.0, "stock")
    assert outcome.why == "the error is above its limit"


def test_a_refusal_fails_without_the_paths_in_it():
    def refused(registry: Registry) -> list[mx.array]:
        raise KernelError("It failed in /Users/somebody/x/kernel.metal:3.")

    assert outcome_of(refused, device()).why == "It failed in kernel.metal:3."


def test_every_text_of_a_report_is_without_paths():
    report = {
        "races": [{"refused": {"simd": "in /Users/ada/k.metal: error"}, "us": 1.5}],
        "n": None,
    }
    wanted = {"races": [{"refused": {"simd": "in k.metal: error"}, "us": 1.5}], "n": None}
    assert without_names(report) == wanted


def test_paths_are_taken_out_and_other_slashes_stay():
    text = "in /home/ada/.cache/k-1/a.cpp:3:7: error, see ~/ada/b.txt; 24/4 heads, bytes/s and/or"
    assert without_paths(text) == "in a.cpp:3:7: error, see b.txt; 24/4 heads, bytes/s and/or"
    assert without_paths("in C D/x/a.h", home=Path("/Users/C D")) == "in C D/x/a.h"
    assert without_paths("in /Users/C D/x/a.h", home=Path("/Users/C D")) == "in a.h"


def test_distance_and_difference():
    assert distance([1.0, -4.0], [1.0, -4.0]) == 0.0
    assert distance([1.0, -3.0], [1.0, -4.0]) == 0.25
    assert distance([float("nan")], [1.0]) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        distance([1.0], [1.0, 2.0])
    assert different(mx.array([0.0, 1.0]), mx.array([-0.0, 1.0])) == 0.5
    assert different(mx.array([1.0]), mx.array([1.0, 2.0])) == 1.0
    same, other = mx.array([1.0, 2.0]), mx.array([1.0, 3.0])
    assert pairs_differ([same, same, same, other]) == 0.5


def test_every_kernel_of_the_project_has_checks_of_values_and_the_promised_ones_of_bits():
    registry = Registry("reference")
    assert {check.subject for check in value_checks(registry)} == KERNELS
    contracts = {check.subject for check in contract_checks(registry)}
    assert contracts == {"gated_delta_verify", "skinny_qmm", "verify_attention"}
    bits = [*contract_checks(registry), *stock_checks()]
    assert all(check.limit == 0 for check in bits)
    names = [(check.subject, check.name) for check in kernel_checks(registry)]
    assert len(set(names)) == len(names)
