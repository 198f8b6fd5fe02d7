"""Random requests on the fast table and the tiny hybrid: drafting changes nothing but speed."""

from itertools import islice
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lse_mlx.decode.session import Session
from lse_mlx.drafters.scripted import ScriptedDrafter
from lse_mlx.target.model import Target
from lse_mlx.target.tokenizer import Tokenizer
from tests.boundaries.asked import Asked
from tests.boundaries.drafts import agreeing, guessing, knowing, leaning
from tests.boundaries.fast_tables import (
    FastTarget,
    ReadingContext,
    ReadingDrafter,
    assert_table_holds,
)
from tests.boundaries.languages import Language, of_size
from tests.boundaries.one_token import Answer, LogitsOf, one_token, plain, until_the_end
from tests.boundaries.replies import assert_answers, assert_streamed, reply
from tests.boundaries.slow_walk import Draft, walked
from tests.boundaries.stepwise import TAPS, Stepwise
from tests.boundaries.strategies import KNOWN, decided, next_turns, patterns, requests
from tests.tiny_models import VOCAB, RecordingDrafter

TABLE = FastTarget.random(0, 40)
WORDS = of_size(40)
HYBRID_WORDS = of_size(VOCAB)
GREEDY, SAMPLED, WALKED, ON_HYBRID = 850, 450, 650, 80
"""Examples of each kind."""
PHASES = (Phase.generate, Phase.shrink)

depths = st.integers(1, 7)


def known_to(asked: Asked, logits_of: LogitsOf) -> list[int]:
    """The prompt and what the target alone says after it, also behind the end of the reply."""
    return [*asked.prompt, *(c.token for c in islice(plain(logits_of, asked), KNOWN))]


def check(
    session: Session,
    asked: Asked,
    answer: Answer,
    tokenizer: Tokenizer,
    words: Language,
    **how: Any,
) -> list[int]:
    """One reply of the code under test is `answer`; the tokens that the session then holds."""
    held = list(session.tokens)
    found = reply(session, asked, tokenizer, **how)
    assert_answers(found, answer, asked)
    assert_streamed(found, asked, words)
    if answer.held:
        goes_on = len(held) < len(asked.prompt) and asked.prompt[: len(held)] == held
        assert found.timings.prompt_cached_n == (len(held) if goes_on else 0)
        assert found.timings.prompt_n == len(asked.prompt) - found.timings.prompt_cached_n
    return [*asked.prompt, *answer.ids][: answer.held]


@settings(phases=PHASES, max_examples=GREEDY)
@given(asked=requests(TABLE.logits, WORDS), right=patterns, depth=depths, data=st.data())
def test_greedy(
    table_tokenizer: Tokenizer, asked: Asked, right: list[int], depth: int, data: st.DataObject
) -> None:
    """Drafts right for any number of tokens, and the target alone beside a drafter."""
    answer = one_token(TABLE.logits, asked, WORDS)
    again = data.draw(next_turns(asked, answer.ids, answer.held))
    more = one_token(TABLE.logits, again, WORDS)
    draft = knowing(known_to(asked, TABLE.logits), right, 40, depth)
    for speculate in (True, False):
        session = Session(TABLE, ReadingDrafter(draft, depth))  # pyright: ignore
        how = {"speculate": speculate, "prefill_rows": data.draw(st.integers(1, 4))}
        holds = check(session, asked, answer, table_tokenizer, WORDS, **how)
        assert_table_holds(session, holds)
        # The next turn drafts where this one did not, with a drafter that read it all the same.
        how["speculate"] = data.draw(st.booleans())
        assert_table_holds(session, check(session, again, more, table_tokenizer, WORDS, **how))


@settings(phases=PHASES, max_examples=SAMPLED)
@given(asked=requests(TABLE.logits, WORDS, sampled=True), data=st.data())
def test_sampled_by_the_target_alone(
    table_tokenizer: Tokenizer, asked: Asked, data: st.DataObject
) -> None:
    answer = decided(lambda: one_token(TABLE.logits, asked, WORDS))
    again = data.draw(next_turns(asked, answer.ids, answer.held))
    more = decided(lambda: one_token(TABLE.logits, again, WORDS))
    drafter = data.draw(st.sampled_from([None, ReadingDrafter(guessing(0, 40))]))
    session = Session(TABLE, drafter)  # pyright: ignore
    for one, wanted in ((asked, answer), (again, more)):
        holds = check(session, one, wanted, table_tokenizer, WORDS, speculate=False)
        assert_table_holds(session, holds)


@st.composite
def drafts(draw: st.DrawFn, asked: Asked) -> tuple[Draft, int]:
    """A draft of any kind, and its depth."""
    depth = draw(depths)
    match draw(st.sampled_from(["knowing", "agreeing", "leaning", "guessing"])):
        case "knowing":
            known = decided(lambda: known_to(asked, TABLE.logits))
            return knowing(known, draw(patterns), 40, depth), depth
        case "agreeing":
            return agreeing(TABLE.logits, asked, depth), depth
        case "leaning":
            return leaning(TABLE.logits, asked, depth), depth
        case _:
            return guessing(draw(st.integers(0, 9)), 40, depth), depth


@settings(phases=PHASES, max_examples=WALKED)
@given(asked=requests(TABLE.logits, WORDS, sampled=True), data=st.data())
def test_sampled_with_a_drafter(
    table_tokenizer: Tokenizer, asked: Asked, data: st.DataObject
) -> None:
    """Token for token the walk that the definition of speculative sampling gives for this seed."""
    draft, depth = data.draw(drafts(asked))
    session = Session(TABLE, ReadingDrafter(draft, depth))  # pyright: ignore

    def walk(one: Asked) -> Answer:
        return decided(lambda: until_the_end(walked(TABLE.logits, one, draft), one, WORDS))

    answer = walk(asked)
    assert_table_holds(session, check(session, asked, answer, table_tokenizer, WORDS))
    again = data.draw(next_turns(asked, answer.ids, answer.held))
    if isinstance(session.context, ReadingContext):
        session.context.drafts = 0  # the next reply's drafts are counted from its own beginning
    assert_table_holds(session, check(session, again, walk(again), table_tokenizer, WORDS))


@settings(phases=PHASES, max_examples=ON_HYBRID)
@given(data=st.data())
def test_on_the_tiny_hybrid(
    target: Target, stepwise: Stepwise, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """The same for a real target, whose state and the drafter's context are compared bit for bit."""
    sampled = data.draw(st.booleans())
    asked = data.draw(requests(stepwise.logits, HYBRID_WORDS, sampled))
    answer = decided(lambda: one_token(stepwise.logits, asked, HYBRID_WORDS))
    again = data.draw(next_turns(asked, answer.ids, answer.held))
    more = decided(lambda: one_token(stepwise.logits, again, HYBRID_WORDS))
    known = known_to(asked, stepwise.logits)
    right = data.draw(patterns)

    def script(position: int, drafts: int) -> list[int]:
        k = right[drafts % len(right)]
        following = known[position + 1 : position + 8]
        return [t if i < k else (t + 1) % VOCAB for i, t in enumerate(following)]

    drafter = RecordingDrafter(ScriptedDrafter(script, taps=TAPS))
    session = Session(target, drafter)
    for one, wanted in ((asked, answer), (again, more)):
        # Drafted from points, a sampled reply takes its tokens from other uniforms than a plain one.
        speculate = not sampled and data.draw(st.booleans())
        holds = check(session, one, wanted, tokenizer, HYBRID_WORDS, speculate=speculate)
        stepwise.assert_holds(session, holds)
