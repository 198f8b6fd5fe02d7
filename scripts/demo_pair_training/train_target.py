"""Stage ``target``: language-model training of the target, before rounding."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from .data import IGNORE, Corpus, RowFeed, batches
from .loops import Schedule, faster_step, run
from .optimizers import PairOptimizer
from .target_model import PLAIN, Blocks, TargetModel, TargetShape, Working, forward


@dataclass(frozen=True)
class TargetSettings:
    """Sizes and time of the main training."""

    seconds: float = 215.0
    steps: int = 10**9
    rows: int = 64
    width: int = 512
    peak: float = 4e-3
    weight_decay: float = 0.2
    compile_mode: str = "auto"
    seed: int = 1


def token_losses(head: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy ``[rows, T]`` in nats of fp32 logits; 0 where the label is ignored."""
    logits = F.linear(hidden, head).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(labels.shape)


@cache
def compiled_losses() -> Callable[..., Tensor]:
    return torch.compile(token_losses, dynamic=False)


@torch.no_grad()
def held_out_loss(w: Working, ids: Tensor, labels: Tensor, size: int = 256) -> float:
    """Mean nats per label."""
    total = sum(
        token_losses(w.head, forward(w, x)[0], y).double().sum()
        for x, y in batches(ids, labels, size=size)
    )
    return float(total / (labels != IGNORE).sum())


def make_optimizer(model: TargetModel, weight_decay: float) -> PairOptimizer:
    """Muon for the layer matrices, decayed AdamW for the small gates, plain AdamW for the rest."""
    gates = [layer[n] for layer in model.layers for n in ("in_proj_a", "in_proj_b") if n in layer]
    return PairOptimizer(model, model.matrices(), gates, weight_decay=weight_decay)


def compute_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def save_model(model: TargetModel, path: Path) -> None:
    """Write the unrounded fp32 parameters, replacing the file in one go."""
    part = path.with_suffix(".part")
    save_file({k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}, part)
    part.replace(path)


def load_model(path: Path, shape: TargetShape, device: torch.device) -> TargetModel:
    model = TargetModel(shape)
    model.load_state_dict(load_file(path))
    return model.to(device)


def make_loss(
    model: TargetModel, rows: Tensor, dtype: torch.dtype
) -> Callable[[bool], Callable[[], Tensor]]:
    """Builder of the loss over a static buffer ``rows [B, T + 1]``."""

    def build(compiled: bool) -> Callable[[], Tensor]:
        blocks, losses = (
            (Blocks.compiled(), compiled_losses()) if compiled else (PLAIN, token_losses)
        )

        def loss() -> Tensor:
            w = model.working(dtype)
            hidden, _ = forward(w, rows[:, :-1], blocks=blocks)
            return losses(w.head, hidden, rows[:, 1:].contiguous()).mean().view(1)

        return loss

    return build


def train_target(
    corpus: Corpus, out: Path, shape: TargetShape, settings: TargetSettings, device: torch.device
) -> None:
    """Train and write ``target_float.safetensors`` and ``target_report.json`` into ``out``."""
    torch.manual_seed(settings.seed)
    model = TargetModel(shape).to(device)
    dtype = compute_dtype(device)
    feed = RowFeed(corpus.chats, settings.width, corpus.newline, device, settings.seed)
    rows = feed.batch(settings.rows).clone()
    optimizer = make_optimizer(model, settings.weight_decay)
    step, notes = faster_step(make_loss(model, rows, dtype), optimizer, settings.compile_mode)
    print("step", notes, flush=True)
    schedule = Schedule(settings.seconds, settings.peak, settings.steps)
    history = run(
        "target",
        step,
        lambda: rows.copy_(feed.batch(settings.rows)),
        schedule,
        checkpoint=lambda: save_model(model, out / "target_float.partial"),
    )
    save_model(model, out / "target_float.safetensors")
    ids, labels = corpus.held_rows("choose", device)
    report = {
        "settings": asdict(settings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "step": notes,
        "epochs": feed.epochs,
        "held_out_loss": held_out_loss(model.working(dtype), ids, labels),
        "held_out_loss_rounded": held_out_loss(model.working(dtype, quantize=True), ids, labels),
        "history": asdict(history),
    }
    print("held out", report["held_out_loss"], report["held_out_loss_rounded"], flush=True)
    (out / "target_report.json").write_text(json.dumps(report, indent=1))
