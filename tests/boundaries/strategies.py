"""Random requests: ends of every kind, rules of every kind, greedy and sampled, and how drafts go."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from hypothesis import reject
from hypothesis import strategies as st

from lse_mlx.decode.sampling import Sampling
from tests.boundaries.asked import Asked
from tests.boundaries.languages import Language
from tests.boundaries.one_token import LogitsOf, plain
from tests.decode.definition import Undecided

T = TypeVar("T")

LONGEST = 24
"""Tokens of a reply at most: three blocks of eight."""
KNOWN = LONGEST + 9
LETTERS = "aabbcx \n\n<e.é日👩😊\u200d\u0301\ufffd"

often_none = st.sampled_from([0.0, 0.0, -0.5, 0.3, 1.1, 2.0])
windows = st.sampled_from([1, 2, 3, 5, 17, 64])
samplings = st.builds(
    Sampling,
    st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    st.sampled_from([0, 0, 1, 3, 10, 100]),
    st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    st.sampled_from([0.0, 0.0, 0.05, 0.4]),
)
patterns = st.lists(st.integers(0, 7), min_size=1, max_size=4)


def decided(answer: Callable[[], T]) -> T:
    """The answer, or another example where rounding decides which it is."""
    try:
        return answer()
    except Undecided:
        reject()


@st.composite
def requests(
    draw: st.DrawFn, logits_of: LogitsOf, language: Language, sampled: bool = False
) -> Asked:
    """A request of at most LONGEST tokens, all of whose wishes can be met together."""
    vocab = len(language.words)
    tokens = st.integers(0, vocab - 1)
    most = draw(st.integers(1, LONGEST))
    by_limit = draw(st.booleans())
    asked = Asked(
        prompt=draw(st.lists(tokens, min_size=1, max_size=6)),
        max_tokens=most if by_limit else draw(st.sampled_from([None, LONGEST + 1])),
        room=draw(st.integers(most, 2 * LONGEST)) if by_limit else most,
        sampling=draw(samplings) if sampled else Sampling(),
        seed=draw(st.integers(0, 2**32)) if sampled else 0,
        repetition=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8, 3.0])),
        repetition_window=draw(windows),
        presence=draw(often_none),
        presence_window=draw(windows),
        frequency=draw(often_none),
        frequency_window=draw(windows),
        logit_bias=draw(
            st.dictionaries(tokens, st.floats(-9, 9, width=32, allow_subnormal=False), max_size=3)
        ),
        top_logprobs=draw(st.sampled_from([None, None, 0, 3])),
    )
    said = decided(lambda: [c.token for c in islice(plain(logits_of, asked), most)])
    common = st.sampled_from(said)
    asked = replace(asked, stop_tokens=draw(st.frozensets(tokens | common, max_size=3)))
    if asked.stop_tokens:
        end_tokens = draw(st.sampled_from(["allowed", "allowed", "banned", "required"]))
        asked = replace(asked, end_tokens=end_tokens)
    least = most - 1 if asked.end_tokens == "required" else most
    asked = replace(asked, min_tokens=draw(st.just(0) | st.integers(0, least)))
    return replace(
        asked,
        stops=tuple(draw(st.lists(_stop_strings(language.whole(said)), max_size=3))),
        cancel_at=draw(st.none() | st.none() | st.integers(0, most)),
    )


def _stop_strings(text: str) -> st.SearchStrategy[str]:
    """Parts of `text`, and words of the language that may or may not come."""
    at, size = st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)
    parts = st.builds(lambda start, n: text[start : start + n], at, size)
    return (parts | st.text(LETTERS, min_size=1, max_size=4)).filter(bool)


@st.composite
def next_turns(draw: st.DrawFn, before: Asked, said: list[int], held: int) -> Asked:
    """A short request after `before`, which said `said` and left a session that holds `held` tokens.

    Its prompt goes on from there, leaves it somewhere inside, or is the same again.
    """
    vocab_tokens = st.integers(0, 1 + max([*before.prompt, *said]))
    every = [*before.prompt, *said]
    more = draw(st.lists(vocab_tokens.map(lambda t: max(0, t - 1)), min_size=1, max_size=4))
    prompt = draw(
        st.sampled_from(
            [
                [*every, *more],
                [*every[:held], *more],
                [*every[: draw(st.integers(0, len(every)))], *more],
                before.prompt,
                every,
            ]
        )
    )
    return replace(
        before,
        prompt=prompt,
        max_tokens=draw(st.integers(1, 9)),
        room=60,
        stops=(),
        cancel_at=None,
        min_tokens=0,
        end_tokens="allowed",
    )
