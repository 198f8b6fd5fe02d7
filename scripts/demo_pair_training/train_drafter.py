"""Stage ``drafter``: train the DFlash2 drafter on the frozen target's own talks.

The target's features and last hidden rows are computed once. A training row is an anchor inside a
reply and the seven tokens after it; the labels are the target's full distributions there.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import drafter_model
from .data import batches
from .decoding import Rollouts
from .drafter_model import DrafterModel, DrafterShape
from .export import export_drafter, load_drafter, load_target
from .loops import Schedule, faster_step, run
from .optimizers import PairOptimizer
from .rollouts import load_rollouts
from .target_model import Working
from .target_model import forward as target_forward
from .train_target import compute_dtype


@dataclass(frozen=True)
class DrafterSettings:
    """Sizes and time of the drafter's training."""

    seconds: float = 620.0
    steps: int = 10**9
    segments: int = 64
    segment_length: int = 256
    anchors: int = 32
    peak: float = 2e-3
    weight_decay: float = 0.01
    position_decay: float = 4.0  # proposal k = 0..6 weighs exp(-k / 4)
    plain_weight: float = 0.5  # of the loss without the selector
    conversations: int = 10**9
    compile_mode: str = "auto"
    seed: int = 4


@dataclass
class Features:
    """Taps ``[rows, T, taps * H]`` and last hidden rows ``[rows, T, H]`` of all talks."""

    taps: Tensor
    hidden: Tensor


@torch.no_grad()
def features(w: Working, tokens: Tensor, taps: tuple[int, ...], size: int = 128) -> Features:
    """Teacher-forced features of ``tokens [rows, T]`` in the compute precision."""
    rows, length = tokens.shape
    dtype, width = w.layers[0]["gate_proj"].dtype, w.shape.hidden
    out = Features(
        torch.empty(rows, length, len(taps) * width, dtype=dtype, device=tokens.device),
        torch.empty(rows, length, width, dtype=dtype, device=tokens.device),
    )
    index = torch.arange(rows)
    for where, part in batches(index, tokens, size=size):
        hidden, tapped = target_forward(w, part, taps)
        span = slice(int(where[0]), int(where[-1]) + 1)
        out.taps[span] = torch.cat(tapped, -1).to(dtype)
        out.hidden[span] = hidden.to(dtype)
    return out


@dataclass
class Buffers:
    """One static batch of B segments, N anchors each; positions are absolute in the talk."""

    features: Tensor  # [B, T, taps * H]
    first: Tensor  # [B] position of the segment's first feature
    anchors: Tensor  # [B, N] positions
    tokens: Tensor  # [B, N, 8] the anchor and the seven tokens after it
    hidden: Tensor  # [B, N, 7, H] target rows that predict those seven
    valid: Tensor  # [B, N, 7] 1 where the token belongs to the anchor's reply


class SegmentFeed:
    """Draws segments and anchors.

    A talk of 512 positions is cut into segments of 256 that overlap by the window, so that every
    anchor has its whole window: anchors lie anywhere in the first one and in the second half of
    the others, and all positions are equally likely.
    """

    def __init__(self, talks: Rollouts, made: Features, s: DrafterSettings, shape: DrafterShape):
        self.talks, self.made, self.s, self.shape = talks, made, s, shape
        self.device = talks.tokens.device
        stride = s.segment_length // 2
        if stride < shape.window and talks.tokens.shape[1] > s.segment_length:
            raise ValueError("a segment must hold two windows")
        self.stride = stride
        self.slots = talks.tokens.shape[1] // stride  # half segments with anchors, per talk
        following = F.pad(talks.turn[:, 1:], (0, 1)) == talks.turn
        self.may_anchor = (talks.turn > 0) & following
        self.tokens = F.pad(talks.tokens, (0, shape.proposals))
        self.turn = F.pad(talks.turn, (0, shape.proposals))

    def load(self, b: Buffers) -> None:
        s, n = self.s, self.shape.proposals
        row = torch.randint(len(self.talks.tokens), (s.segments,), device=self.device)
        slot = torch.randint(self.slots, (s.segments,), device=self.device)
        b.first.copy_((slot - 1).clamp_min(0) * self.stride)
        span = b.first[:, None] + torch.arange(s.segment_length, device=self.device)
        b.features.copy_(self.made.taps[row[:, None], span])
        inside = self.may_anchor[row[:, None], span] & (span // self.stride == slot[:, None])
        pick = torch.multinomial(inside.float() + 1e-6, s.anchors, replacement=True)
        b.anchors.copy_(span.gather(1, pick))
        ahead = b.anchors[..., None] + torch.arange(n + 1, device=self.device)
        rows = row[:, None, None]
        b.tokens.copy_(self.tokens[rows, ahead])
        turn = self.turn[rows, ahead]
        b.valid.copy_((turn[..., 1:] == turn[..., :1]) & (turn[..., :1] > 0))
        last = self.made.hidden.shape[1] - 1
        b.hidden.copy_(self.made.hidden[rows, ahead[..., :-1].clamp_max(last)])

    def buffers(self) -> Buffers:
        s, d, n = self.s, self.device, self.shape.proposals
        width, dtype = self.shape.hidden, self.made.taps.dtype
        b, a = s.segments, s.anchors
        taps = width * len(self.shape.taps)
        return Buffers(
            torch.zeros(b, s.segment_length, taps, device=d, dtype=dtype),
            torch.zeros(b, device=d, dtype=torch.int64),
            torch.zeros(b, a, device=d, dtype=torch.int64),
            torch.zeros(b, a, n + 1, device=d, dtype=torch.int64),
            torch.zeros(b, a, n, width, device=d, dtype=dtype),
            torch.zeros(b, a, n, device=d),
        )


def label_losses(
    rows: Tensor, term: Tensor, true_rows: Tensor, head: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses ``[B, N, 7]``: soft without and with the selector term, then the same two hard ones.

    Soft labels are the target's distributions, from its ``true_rows [B, N, 7, H]``.
    """
    with torch.no_grad():
        target = F.linear(true_rows.float(), head).softmax(-1)
    logits = F.linear(rows, head)
    plain, chosen = logits.log_softmax(-1), (logits + term).log_softmax(-1)
    soft = -(target * plain).sum(-1), -(target * chosen).sum(-1)
    hard = (
        -plain.gather(-1, labels[..., None])[..., 0],
        -chosen.gather(-1, labels[..., None])[..., 0],
    )
    return *soft, *hard


@cache
def compiled_label_losses() -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(label_losses, dynamic=False)


def make_loss(
    model: DrafterModel, target: Working, b: Buffers, s: DrafterSettings
) -> Callable[[bool], Callable[[], Tensor]]:
    """Builder of the losses [total, plain hard, selector hard, plain soft, selector soft]."""
    place = torch.arange(model.shape.proposals, device=b.valid.device)
    place = torch.exp(-place / s.position_decay)
    dtype = b.features.dtype

    def build(compiled: bool) -> Callable[[], Tensor]:
        block = drafter_model.compiled_block() if compiled else drafter_model.drafter_block
        losses_of = compiled_label_losses() if compiled else label_losses

        def loss() -> Tensor:
            w = model.working(dtype)
            rows = drafter_model.forward(
                w, b.features, b.first, b.anchors, b.tokens[..., 0], target.embedding, block
            )
            term = drafter_model.selector_term(w, rows, b.tokens[..., :-1])
            losses = losses_of(rows, term, b.hidden, target.head, b.tokens[..., 1:])
            weight = b.valid * place
            weight = weight / weight.sum().clamp_min(1)
            plain, chosen, *hard = [(x * weight).sum() for x in losses]
            return torch.stack([s.plain_weight * plain + chosen, *hard, plain, chosen])

        return loss

    return build


def start_from(model: DrafterModel, folder: Path) -> None:
    """Take over an exported drafter; layers that it lacks keep their fresh parameters."""
    other = load_drafter(folder, torch.device("cpu"))
    wanted = replace(model.shape, layers=other.shape.layers)
    if other.shape != wanted:
        raise ValueError(f"the drafter in {folder} has other sizes than the one to train")
    model.load_state_dict(other.state_dict(), strict=False)


def train_drafter(
    work: Path,
    target_folder: Path,
    folder: Path,
    shape: DrafterShape,
    s: DrafterSettings,
    device: torch.device,
    start: Path | None = None,
) -> None:
    """Train on ``rollouts.npz`` of ``work`` and export the drafter into ``folder``.

    ``start`` is the folder of a drafter to train on from, which may have fewer layers.
    """
    torch.manual_seed(s.seed)
    target = load_target(target_folder, device).working(compute_dtype(device))
    talks = load_rollouts(work / "rollouts.npz", device)
    talks = Rollouts(talks.tokens[: s.conversations], talks.turn[: s.conversations])
    made = features(target, talks.tokens, shape.taps)
    feed = SegmentFeed(talks, made, s, shape)
    buffers = feed.buffers()
    feed.load(buffers)
    model = DrafterModel(shape)
    if start is not None:
        start_from(model, start)
    model.to(device)
    optimizer = PairOptimizer(model, model.matrices(), model.decayed(), weight_decay=s.weight_decay)
    step, notes = faster_step(make_loss(model, target, buffers, s), optimizer, s.compile_mode)
    print("step", notes, flush=True)
    schedule = Schedule(s.seconds, s.peak, s.steps, floor=0.02)
    history = run(
        "drafter",
        step,
        lambda: feed.load(buffers),
        schedule,
        report_every=1000,
        checkpoint=lambda: export_drafter(model, work / "drafter_partial"),
    )
    export_drafter(model, folder)
    report = {
        "settings": asdict(s),
        "parameters": sum(p.numel() for p in model.parameters()),
        "step": notes,
        "history": asdict(history),
    }
    (work / "drafter_report.json").write_text(json.dumps(report, indent=1))
