"""The teacher of the demo pair: its files, its sampler, and the shards of its replies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.demo_pair_training.shards import ReplyBatch, pack_shards, read_shards, write_batch


def test_shards_round_trip(tmp_path: Path):
    rng = np.random.default_rng(0)
    for turn, number in ((1, 0), (1, 1), (2, 0)):
        replies = [rng.integers(0, 4_000, n).astype(np.uint16) for n in (3, 1, 7)]
        write_batch(tmp_path, number, ReplyBatch(turn, np.arange(3, dtype=np.int32), replies))
    pack_shards(tmp_path, tmp_path / "out", threads=2)
    batches = list(read_shards(tmp_path / "out"))
    assert [batch.turn for batch in batches] == [1, 1, 2]
    assert [len(reply) for reply in batches[2].replies] == [3, 1, 7]
    assert all((a == b).all() for a, b in zip(batches[2].replies, replies, strict=True))


def test_block_expansion():
    torch = pytest.importorskip("torch")
    from scripts.demo_pair_training.teacher_files import expand_blocks

    cpu = torch.device("cpu")
    half = np.array([0.5, -1.0], np.float16)
    nibbles = np.arange(16, dtype=np.uint8) | (15 << 4)
    values = expand_blocks(half.tobytes() + nibbles.tobytes(), "Q4_1", cpu)
    assert values[:16].tolist() == [i * 0.5 - 1.0 for i in range(16)]
    assert values[16:].tolist() == [6.5] * 16
    signed = np.arange(-16, 16, dtype=np.int8)
    values = expand_blocks(half[:1].tobytes() + signed.tobytes(), "Q8_0", cpu)
    assert values.tolist() == [i * 0.5 for i in range(-16, 16)]


def _tiny_teacher(torch):
    from scripts.demo_pair_training.sampler import Teacher
    from scripts.demo_pair_training.teacher_files import TeacherShape

    shape = TeacherShape(layers=2, hidden=24, heads=6, kv_heads=2, theta=100.0, eps=1e-5)
    sizes = {"attn_q": (24, 24), "attn_k": (8, 24), "attn_v": (8, 24), "attn_output": (24, 24)}
    sizes |= {"ffn_gate": (32, 24), "ffn_up": (32, 24), "ffn_down": (24, 32)}
    sizes |= {"attn_norm": (24,), "ffn_norm": (24,)}
    torch.manual_seed(0)
    weights = {
        f"blk.{i}.{name}.weight": torch.randn(size) / 3
        for i in range(2)
        for name, size in sizes.items()
    }
    weights |= {"token_embd.weight": torch.randn(20, 24), "output_norm.weight": torch.ones(24)}
    return Teacher(shape, weights)


def test_sampled_replies_follow_their_own_prompt():
    """Cold draws are the arg-max, so a chat must not change with the company it is in."""
    torch = pytest.importorskip("torch")
    from scripts.demo_pair_training.sampler import Settings, sample_batch

    teacher = _tiny_teacher(torch)
    cold = Settings(temperature=1e-4, min_p=0.5, max_new=6)
    prompts = [[1, 5, 9], [4], [7, 7, 3, 2, 8]]

    def sample(batch: list[list[int]]) -> list[list[int]]:
        rng = torch.Generator().manual_seed(1)
        return [row.tolist() for row in sample_batch(teacher, batch, cold, rng, end_token=19)]

    together = sample(prompts)
    assert together == [sample([prompt])[0] for prompt in prompts]
    assert all(0 < len(reply) <= 6 for reply in together)
    assert all(19 not in reply[:-1] for reply in together)


def test_min_p_leaves_only_likely_tokens():
    torch = pytest.importorskip("torch")
    from scripts.demo_pair_training.sampler import Settings, draw

    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(4_000, 1)
    rng = torch.Generator().manual_seed(0)
    drawn = draw(logits, Settings(temperature=1.0, min_p=0.2), rng)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    expected = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)
