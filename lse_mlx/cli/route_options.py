"""Options of `trace` about a mixture of experts: what predicts its routes, and what that is tried on."""

from pathlib import Path
from typing import Annotated

import typer

from lse_mlx.checkpoints.target_config import is_mixture, read_config
from lse_mlx.errors import RequestError, counted
from lse_mlx.routes.predictors import Previous, RoutePredictor
from lse_mlx.routes.report import RouteReport
from lse_mlx.routes.store import StoreCosts

ROUTES = "Predicted experts"

PREVIOUS = "previous"
LARGEST = 10**9

Predict = Annotated[
    str | None,
    typer.Option(
        help="Of a mixture of experts: predict what each pass will read, record it with what it did "
        'read, and report what fetching ahead would have saved. "previous" predicts what the last '
        "token read. The reply is the same with any prediction.",
        metavar="WHICH",
        rich_help_panel=ROUTES,
    ),
]
StoreBandwidth = Annotated[
    int | None,
    typer.Option(
        help="MB a second from the simulated store of experts; with --predict. "
        f"{StoreCosts.bytes_per_us} if not given.",
        metavar="MB",
        rich_help_panel=ROUTES,
    ),
]
StoreLatency = Annotated[
    int | None,
    typer.Option(
        help="Microseconds before each transfer from it; with --predict. "
        f"{StoreCosts.latency_us} if not given.",
        metavar="US",
        rich_help_panel=ROUTES,
    ),
]
StoreCache = Annotated[
    int | None,
    typer.Option(
        help="MB of experts that stay in memory; with --predict. "
        f"{StoreCosts.cache_bytes // 10**6} if not given.",
        metavar="MB",
        rich_help_panel=ROUTES,
    ),
]


def costs_of(
    predict: str | None, bandwidth: int | None, latency: int | None, cache: int | None
) -> StoreCosts:
    """The simulated store of a command. Raises RequestError for options that do not fit."""
    if predict not in (None, PREVIOUS):
        raise RequestError(f"--predict is {predict[:60]!r}: give {PREVIOUS!r}.")
    for name, value, least in (
        ("--store-bandwidth", bandwidth, 1),
        ("--store-latency", latency, 0),
        ("--store-cache", cache, 0),
    ):
        if value is None:
            continue
        if predict is None:
            raise RequestError(f"{name} is of no use without --predict: give both or neither.")
        if not least <= value <= LARGEST:
            raise RequestError(f"{name} is {value}: give a number from {least} to {LARGEST}.")
    return StoreCosts(
        bytes_per_us=StoreCosts.bytes_per_us if bandwidth is None else bandwidth,
        latency_us=StoreCosts.latency_us if latency is None else latency,
        cache_bytes=StoreCosts.cache_bytes if cache is None else cache * 10**6,
    )


def predictor_for(target: Path) -> RoutePredictor:
    """What predicts the routes of the checkpoint `target`; RequestError for one without experts."""
    if not is_mixture(read_config(target)):
        raise RequestError(
            f"--predict is for a mixture of experts, and {target} is not one: leave it out, or "
            "name a qwen3_5_moe target with --model."
        )
    return Previous()


def figures(report: RouteReport) -> str:
    """A report on one line."""
    total = report.total_recall
    share = "none" if total.share is None else f"{total.share:.1%} of {total.native} choices"
    tickets = ", ".join(f"{count} {state}" for state, count in report.tickets.items() if count)
    return (
        f"experts of {counted(report.committed_rows, 'token')}: {share} predicted; fetched early "
        f"{_mb(report.bytes_early)}, {_mb(report.bytes_used)} of it used and "
        f"{_mb(report.bytes_wasted)} wasted; on demand {_mb(report.bytes_on_demand)}; "
        f"{report.exposed_wait_ms:.3f} ms of waiting; tickets: {tickets or 'none'}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:.3f} MB"
