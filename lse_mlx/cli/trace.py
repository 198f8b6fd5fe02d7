"""`lse-mlx trace`: record a generation as a folder that any runtime can read."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lse_mlx.checkpoints.conversion.new_folder import check_new
from lse_mlx.checkpoints.resolve import AUTO
from lse_mlx.cli import reply_options as reply
from lse_mlx.cli import route_options as experts
from lse_mlx.cli.common import choose_model, notes, one_sentence_errors, read_prompt
from lse_mlx.cli.kernels import Exact, Kernels, RequireDeviceKernels, kernel_registry
from lse_mlx.cli.options import (
    AsJson,
    Drafter,
    MaxTokens,
    ModelOrApple,
    NoDrafter,
    Prompt,
    Raw,
    Yes,
    check_drafter,
)
from lse_mlx.cli.pair import AllowRevisionMismatch, Offline, open_pair
from lse_mlx.cli.progress import progress
from lse_mlx.decode.randomness import Streams
from lse_mlx.decode.sampling import Sampling
from lse_mlx.decode.stopping import Limits
from lse_mlx.engine import MAX_TOKENS
from lse_mlx.errors import RequestError, counted, printable
from lse_mlx.loading import load_pair
from lse_mlx.protocol.trace import Trace
from lse_mlx.routes.report import RouteReport
from lse_mlx.routes.sidecar import RouteSidecar
from lse_mlx.traces.identity import identify
from lse_mlx.traces.recording import record, write

PAYLOAD, DIGEST = "payload", "digest"


def trace(
    prompt: Prompt,
    out: Annotated[
        Path, typer.Option(help="A folder to make; it must not exist yet.", metavar="DIR")
    ],
    hidden: Annotated[
        str,
        typer.Option(
            help='What to keep of hidden rows: "payload", all their numbers, or "digest".',
            metavar="WHICH",
        ),
    ] = PAYLOAD,
    raw: Raw = False,
    as_json: AsJson = False,
    model: ModelOrApple = None,
    drafter: Drafter = AUTO,
    no_drafter: NoDrafter = False,
    offline: Offline = False,
    allow_revision_mismatch: AllowRevisionMismatch = False,
    yes: Yes = False,
    temperature: reply.Temperature = 0.0,
    top_k: reply.TopK = 0,
    top_p: reply.TopP = 1.0,
    min_p: reply.MinP = 0.0,
    seed: reply.Seed = None,
    max_tokens: MaxTokens = MAX_TOKENS,
    predict: experts.Predict = None,
    store_bandwidth: experts.StoreBandwidth = None,
    store_latency: experts.StoreLatency = None,
    store_cache: experts.StoreCache = None,
    kernels: Kernels = "auto",
    exact: Exact = False,
    require_device_kernels: RequireDeviceKernels = False,
) -> None:
    """Answer PROMPT and record every verify pass of it in the folder DIR.

    `lse-mlx replay DIR` lets the target decide all of it again.
    """
    with one_sentence_errors():
        with reply.named_as_options():
            sampling = Sampling(temperature, top_k, top_p, min_p)
            Limits(frozenset(), max_tokens, room=1)
            Streams.from_seed(seed or 0)
        if hidden not in (PAYLOAD, DIGEST):
            raise RequestError(f"--hidden is {hidden[:60]!r}: give {PAYLOAD!r} or {DIGEST!r}.")
        costs = experts.costs_of(predict, store_bandwidth, store_latency, store_cache)
        check_drafter(drafter, no_drafter)
        check_new(out)
        registry = kernel_registry(kernels, exact, require_device_kernels)
        text = read_prompt(prompt, raw)
        chosen = choose_model(model)
        pair = open_pair(
            chosen, None if no_drafter else drafter, offline, allow_revision_mismatch, yes
        )
        predictor = None if predict is None else experts.predictor_for(pair.target)
        with progress() as told:
            engine = load_pair(pair, registry=registry, progress=told)
            identity = identify(pair.target, told)
        with engine:
            sidecar = None if predictor is None else RouteSidecar(engine.target, predictor, costs)
            recorded = record(
                engine.session() if sidecar is None else sidecar.session(engine.drafter),
                identity,
                engine.tokenizer.encode(text, raw),
                stop_tokens=engine.tokenizer.stop_tokens,
                sampling=sampling,
                seed=seed,
                max_tokens=max_tokens,
                keep_hidden=hidden == PAYLOAD,
            )
            write(recorded, out)
            report = None if sidecar is None else sidecar.report(settled=True)
            show(recorded, out, engine.tokenizer.decode(recorded.tokens), report, as_json)


def show(recorded: Trace, out: Path, text: str, report: RouteReport | None, as_json: bool) -> None:
    """Print the reply and on stderr where its trace is, or one JSON object with both.

    report: of predicted routes, shown in the same place; None where nothing was predicted
    """
    header, tokens = recorded.header, recorded.tokens
    if as_json:
        said = {
            "trace": str(out),
            "text": text,
            "token_ids": tokens,
            "steps": len(recorded.steps),
            "routes": len(recorded.routes),
            "stop_reason": header.stop_reason,
            "seed": None if header.greedy else header.seed,
            "target_model_revision": header.target_model_revision,
            "request_owner": header.request_owner,
            "request_generation": header.request_generation,
            "predictions": None if report is None else report.as_dict(),
        }
        print(json.dumps(said, ensure_ascii=False))
        return
    print(text)
    figures = [counted(len(tokens), "token"), counted(len(recorded.steps), "step")]
    if not header.greedy:
        figures.append(f"seed {header.seed}")
    told = f"{', '.join(figures)}, ended by {header.stop_reason}: {printable(str(out))}"
    notes.print(told, style="dim", markup=False)
    if report is not None:
        notes.print(experts.figures(report), style="dim", markup=False)
