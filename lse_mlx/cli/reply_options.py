"""The options about one reply: how its tokens are chosen, and where it ends."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from lse_mlx.cli.options import ENDS
from lse_mlx.decode.randomness import Streams
from lse_mlx.decode.rules import Penalties, Rules
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.stop_strings import check_stops
from lse_mlx.decode.stopping import Limits
from lse_mlx.engine import MOST_LOGPROBS, Engine, check_token_ids, check_top_logprobs
from lse_mlx.errors import RequestError

CHOICE = "How tokens are chosen"
PENALTIES = "Penalties, each over a window of the last tokens"


def _window(penalty: str) -> Any:
    return typer.Option(
        help=f"How many tokens {penalty} looks at.", metavar="N", rich_help_panel=PENALTIES
    )


Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=CHOICE)]
TopK = Annotated[
    int, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.", rich_help_panel=CHOICE)
]
TopP = Annotated[
    float, typer.Option(help="Keep this much probability; 1 keeps all.", rich_help_panel=CHOICE)
]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens below this share of the likeliest; 0 keeps all.", rich_help_panel=CHOICE
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Fixes a sampled reply; a fresh one if not given.", rich_help_panel=CHOICE),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        help="Add VALUE to the logit of token ID; may be repeated.",
        metavar="ID=VALUE",
        rich_help_panel=CHOICE,
    ),
]
TopLogprobs = Annotated[
    int | None,
    typer.Option(
        help="In --json, give each token's log-probability and the N likeliest tokens, 0 to "
        f"{MOST_LOGPROBS}.",
        metavar="N",
        rich_help_panel=CHOICE,
    ),
]
Repetition = Annotated[
    float,
    typer.Option(
        help="Divide positive logits of tokens that occurred by this, and multiply others; 1 is none.",
        rich_help_panel=PENALTIES,
    ),
]
RepetitionWindow = Annotated[int, _window("--repetition-penalty")]
Presence = Annotated[
    float,
    typer.Option(
        help="Subtract this from the logits of tokens that occurred; 0 is none.",
        rich_help_panel=PENALTIES,
    ),
]
PresenceWindow = Annotated[int, _window("--presence-penalty")]
Frequency = Annotated[
    float,
    typer.Option(help="The same for each time that they occurred.", rich_help_panel=PENALTIES),
]
FrequencyWindow = Annotated[int, _window("--frequency-penalty")]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="End the reply before this text; may be repeated.",
        metavar="TEXT",
        rich_help_panel=ENDS,
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(
        help="End the reply at this token too; may be repeated.",
        metavar="ID",
        rich_help_panel=ENDS,
    ),
]
MinTokens = Annotated[
    int,
    typer.Option(
        help="No end token and no --stop before so many tokens.", metavar="N", rich_help_panel=ENDS
    ),
]
EndTokens = Annotated[
    str,
    typer.Option(
        help='"allowed"; "banned": never an end token; "required": the model itself ends the '
        "reply within --max-tokens.",
        metavar="WHICH",
        rich_help_panel=ENDS,
    ),
]


def bias_of(given: Sequence[str]) -> dict[int, float]:
    """What `--logit-bias` says. Raises RequestError for another form, or a token named twice."""
    bias: dict[int, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            token, added = int(name), float(value)
        except ValueError as error:
            raise RequestError(
                f"--logit-bias is {text!r}: give a token id, an equals sign and a number."
            ) from error
        if token in bias:
            raise RequestError(f"--logit-bias names token {token} twice: give it one value.")
        bias[token] = added
    return bias


_OPTIONS = {
    name: f"--{name.removesuffix('s') if name == 'stop_token_ids' else name}".replace("_", "-")
    for name in inspect.signature(Engine.stream).parameters
}
# A name of one word may also be a word: it is the name where the sentence begins with it.
_NAMES = re.compile("|".join(rf"\b{name}\b" if "_" in name else f"^{name}\\b" for name in _OPTIONS))


@contextmanager
def named_as_options() -> Iterator[None]:
    """Let a RequestError name what it is about as the command line does: --top-k, not top_k."""
    try:
        yield
    except RequestError as error:
        said = _NAMES.sub(lambda found: _OPTIONS[found[0]], str(error))
        raise RequestError(said.replace(", or None.", ".")) from error


def checked(**options: Any) -> dict[str, Any]:
    """Options of `Engine.stream`, for a command to check before it downloads or loads anything.

    Raises RequestError for whatever no model can serve; `check_vocabulary` does the rest.
    """
    with named_as_options():
        Sampling(*(options[name] for name in ("temperature", "top_k", "top_p", "min_p")))
        Limits(frozenset(), options["max_tokens"], room=1)
        Streams.from_seed(options["seed"] or 0)
        check_stops(options["stop"])
        check_top_logprobs(options["top_logprobs"])
        some_id = frozenset({0})  # which tokens end a reply is the model's to say
        least, ends, most = (options[name] for name in ("min_tokens", "end_tokens", "max_tokens"))
        Rules(_penalties(options), some_id, least, ends, most)
    return options


def check_vocabulary(options: Mapping[str, Any], vocab_size: int) -> None:
    """Raise RequestError for token ids that a vocabulary of `vocab_size` does not have."""
    with named_as_options():
        check_token_ids("stop_token_ids", options["stop_token_ids"], vocab_size)
        _penalties(options).check_vocab(vocab_size)


def _penalties(options: Mapping[str, Any]) -> Penalties:
    kinds = ("repetition", "presence", "frequency")
    strengths = {kind: options[f"{kind}_penalty"] for kind in kinds}
    windows = {f"{kind}_window": options[f"{kind}_window"] for kind in kinds}
    return Penalties(**strengths, **windows, logit_bias=options["logit_bias"])
