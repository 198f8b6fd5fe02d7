"""What a request measured: counts by hand-computed walks, sums that agree, and the names."""

import json

import pytest

from lse_mlx.decode.acceptance import Verdict
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.stopping import Cut
from lse_mlx.decode.timings import Timings
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.kernels.registry import KernelCounts
from lse_mlx.target.model import Target
from tests.decode.runs import Cold, Session, known_sequence, run, speculating
from tests.decode.tables import TableDrafter, TableTarget
from tests.tiny_models import VOCAB, RecordingDrafter, random_prompt

START, COUNT = 7, 18


@pytest.fixture(scope="module")
def cold(target: Target) -> Cold:
    return known_sequence(target, random_prompt(START, 4), COUNT)


def of(timings: Timings, *names: str) -> list[object]:
    return [timings.as_dict()[name] for name in names]


COUNTS = ("spec_steps", "spec_plain_steps", "spec_proposed", "spec_tested", "spec_accepted")
RATES = ("spec_mean_width", "acceptance_rate", "tokens_per_pass")


def test_whole_blocks(target: Target, cold: Cold) -> None:
    """1 from the prompt, then twice 7 drafts and one more."""
    reply = run(speculating(target, cold.tokens), cold.tokens[:START], max_tokens=17)
    assert of(reply.timings, *COUNTS) == [2, 0, 14, 14, 14]
    assert of(reply.timings, *RATES) == [8.0, 1.0, 8.0]
    assert reply.timings.tested == reply.timings.accepted == [2] * 7
    assert reply.timings.overlap == [2.0] * 7
    assert of(reply.timings, "prompt_n", "prompt_cached_n", "generated_n", "decode_n") == [
        START,
        0,
        17,
        16,
    ]


def test_a_single_token_left_is_judged_like_any_other(target: Target, cold: Cold) -> None:
    reply = run(speculating(target, cold.tokens), cold.tokens[:START], max_tokens=18)
    assert of(reply.timings, *COUNTS) == [3, 0, 15, 15, 15]
    assert of(reply.timings, *RATES) == [18 / 3, 1.0, 17 / 3]


def test_rejections_and_shorter_proposals(target: Target, cold: Cold) -> None:
    """With 9, 6 and 3 tokens left, 7, 6 and 3 drafts are judged; two of each are right."""
    reply = run(speculating(target, cold.tokens, 2), cold.tokens[:START], max_tokens=10)
    assert of(reply.timings, *COUNTS) == [3, 0, 16, 9, 6]
    assert of(reply.timings, *RATES) == [19 / 3, 6 / 9, 3.0]
    assert reply.timings.tested == [3, 3, 3, 0, 0, 0, 0]
    assert reply.timings.accepted == [3, 3, 0, 0, 0, 0, 0]
    assert reply.timings.overlap == [3.0, 3.0, 0, 0, 0, 0, 0]


def test_a_listed_walk(target: Target, cold: Cold) -> None:
    """Three drafts with the second wrong, none, one right one, then three of which two fit."""
    known = cold.tokens[START:]
    wrong = (known[2] + 1) % VOCAB
    drafts = [[known[1], wrong, known[3]], [], [known[4]], known[6:9]]
    session = Session(target, RecordingDrafter(ScriptedDrafter.listed(drafts)))
    reply = run(session, cold.tokens[:START], max_tokens=8)
    assert reply.tokens == known[:8]
    assert of(reply.timings, *COUNTS) == [3, 1, 3 + 1 + 2, 5, 4]
    assert reply.timings.tested == [3, 2, 0, 0, 0, 0, 0]
    assert reply.timings.accepted == [3, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("right", "offset", "tested", "accepted"),
    [
        (7, 4, 4, 4),  # the stop token was drafted, accepted, and is the last looked at
        (7, 8, 7, 7),  # the stop token is the target's own after a whole block
        (2, 3, 3, 2),  # it is the target's own after a rejection
        (0, 1, 1, 0),
    ],
)
def test_proposals_behind_a_stop_do_not_count(
    target: Target, cold: Cold, right: int, offset: int, tested: int, accepted: int
) -> None:
    session = speculating(target, cold.tokens, right)
    reply = run(session, cold.tokens[:START], stops=[cold.tokens[START + offset]])
    assert reply.timings.tested == [1] * tested + [0] * (7 - tested)
    assert reply.timings.accepted == [1] * accepted + [0] * (7 - accepted)
    assert of(reply.timings, *COUNTS) == [1, 0, 7, tested, accepted]
    assert reply.timings.generated_n == offset
    # The first token came with the prompt; the one pass emitted the others, the stop token not.
    assert of(reply.timings, "tokens_per_pass") == [offset - 1]


def test_a_reply_of_one_token_has_no_rates(target: Target, cold: Cold) -> None:
    session = speculating(target, cold.tokens)
    shown = run(session, cold.tokens[:START], max_tokens=1).timings.as_dict()
    assert [shown[name] for name in COUNTS] == [0] * 5
    assert not set(RATES) & set(shown)
    assert shown["decode_n"] == shown["decode_ms"] == shown["decode_per_second"] == 0


def test_a_plain_reply_shows_no_speculation(target: Target, cold: Cold) -> None:
    session = speculating(target, cold.tokens)
    shown = run(session, cold.tokens[:START], max_tokens=6, speculate=False).timings.as_dict()
    assert shown["spec_method"] == "none"
    assert [name for name in shown if name.startswith("spec_")] == ["spec_method"]
    assert not set(RATES) & set(shown)
    assert shown["decode_n"] == 5


@pytest.mark.parametrize("seed", range(40))
def test_sums_agree_in_sampled_walks(seed: int) -> None:
    session = Session(TableTarget.random(seed), TableDrafter.random(seed))
    stops = [3] if seed % 2 else []
    reply = run(session, [1, 2], max_tokens=30, sampling=Sampling(1.0), seed=seed, stops=stops)
    timings = reply.timings
    shown = json.loads(json.dumps(timings.as_dict()))
    assert shown["spec_method"] == "table"
    assert shown["spec_tested"] == sum(timings.tested)
    assert shown["spec_accepted"] == sum(timings.accepted)
    for before, tested, accepted in zip(
        [timings.passes, *timings.accepted], timings.tested, timings.accepted, strict=False
    ):
        assert accepted <= tested <= before
    assert timings.tested[0] == timings.passes
    assert all(0 <= o <= t for o, t in zip(timings.overlap, timings.tested, strict=True))
    # Every pass and every plain step adds its own token to the accepted ones, but for a last pass
    # whose limit is reached by them. The stop token is looked at and not emitted; where it was a
    # draft, its pass did not come to its own token.
    whole = 1 + timings.passes + timings.plain_steps + sum(timings.accepted)
    if reply.reason == "stop_token":
        assert whole - timings.generated_n in (1, 2)
    else:
        assert timings.generated_n == 30
        assert whole - timings.generated_n in (0, 1)
    assert shown["decode_ms"] == pytest.approx(shown["spec_draft_ms"] + shown["spec_verify_ms"])


def test_one_cycle_is_counted_by_its_cut() -> None:
    timings = Timings("x", 4)
    verdict = Verdict(tokens=[5, 6, 7, 8], accepted=3, overlap=[0.5, 0.25, 1.0, 0.125])
    timings.count(4, verdict, Cut([5, 6], 3, "stop_token"), 1.0, 1.25, 2.0)
    assert timings.tested == [1, 1, 1, 0]
    assert timings.accepted == [1, 1, 1, 0]
    assert timings.overlap == [0.5, 0.25, 1.0, 0.0]
    assert (timings.generated_n, timings.passes, timings.proposed) == (2, 1, 4)
    assert (timings.draft_ms, timings.verify_ms, timings.decode_ms) == (250, 750, 1000)


def test_rates_are_per_second_and_leave_out_the_first_token() -> None:
    timings = Timings(prompt_n=30, prompt_ms=500, generated_n=11, decode_ms=2000)
    assert of(timings, "prompt_per_second", "decode_per_second") == [60, 5]
    assert of(Timings(prompt_n=3), "prompt_per_second", "decode_per_second") == [0, 0]


def test_kernels_of_a_request_leave_out_what_others_did() -> None:
    """Two stretches of one request, with another request's work between them."""
    timings = Timings()
    timings.count_kernels(KernelCounts(4, 40.0, 100, 10), KernelCounts(5, 52.0, 130, 11))
    timings.count_kernels(KernelCounts(6, 60.0, 200, 20), KernelCounts(6, 60.0, 203, 20))
    names = ("jit_compiles", "jit_compiles_total", "jit_compile_ms_total")
    assert of(timings, *names) == [1, 6, 60.0]
    assert of(timings, "device_kernel_calls", "reference_calls") == [33, 1]
    assert of(Timings(), *names, "device_kernel_calls", "reference_calls") == [0] * 5
