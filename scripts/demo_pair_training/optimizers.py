"""Muon for the hidden matrices and AdamW for the rest, usable inside a CUDA graph.

The learning rate is a tensor on the device, so that a captured step can be replayed under a
schedule. Muon (Jordan et al., 2024): momentum, then an approximate orthogonalization of every
update by a quintic Newton-Schulz iteration; updates are scaled by 0.2 sqrt(max side), so that one
learning rate serves both parts (Liu et al., 2025).
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(batch: Tensor, iterations: int = 5) -> Tensor:
    """Bring the singular values of ``[n, rows, columns]`` near one (bf16 on a GPU)."""
    a, b, c = NEWTON_SCHULZ
    x = batch.bfloat16() if batch.is_cuda else batch
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(iterations):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class PairOptimizer:
    """One step over all parameters of a module with a shared learning rate and gradient clip."""

    def __init__(
        self,
        module: nn.Module,
        matrices: Sequence[nn.Parameter],
        decayed: Sequence[nn.Parameter] = (),
        *,
        weight_decay: float,
        momentum: float = 0.95,
        clip: float = 1.0,
    ):
        self.parameters = list(module.parameters())
        device = self.parameters[0].device
        self.learning_rate = torch.zeros((), device=device)
        self.weight_decay, self.momentum, self.clip = weight_decay, momentum, clip
        by_shape = defaultdict(list)
        for p in matrices:
            by_shape[tuple(p.shape)].append(p)
        self.groups = list(by_shape.values())
        self.momenta = [torch.stack([torch.zeros_like(p) for p in g]) for g in self.groups]
        taken = {id(p) for p in matrices}
        decay = {id(p) for p in decayed}
        rest = [p for p in self.parameters if id(p) not in taken]
        cuda = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if id(p) in decay], "weight_decay": weight_decay},
                {"params": [p for p in rest if id(p) not in decay], "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
            betas=(0.9, 0.95),
            fused=cuda,
            foreach=False,
            capturable=cuda,
        )
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate  # this very tensor, not a copy

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradients = torch.stack([p.grad for p in group])
            momentum.lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp(momentum, self.momentum))
            update *= 0.2 * max(update.shape[-2:]) ** 0.5 * self.learning_rate
            keep = 1 - self.learning_rate * self.weight_decay
            for p, change in zip(group, update.unbind(), strict=True):
                p.mul_(keep).sub_(change)
        self.adam.step()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all moments (after the warm-up runs of a capture, which use a zero rate)."""
        for momentum in self.momenta:
            momentum.zero_()
        for state in self.adam.state.values():
            for value in state.values():
                value.zero_()
