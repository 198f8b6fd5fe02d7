"""The demo pair's training code against definitions, mlx and mlx-lm."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_pair_training import (  # noqa: E402
    decoding,
    delta_rule,
    drafter_model,
    export,
    quantization,
    speculative,
    target_model,
    train_drafter,
)
from demo_pair_training.data import Chats, pack_rows  # noqa: E402
from demo_pair_training.drafter_model import DrafterModel, DrafterShape  # noqa: E402
from demo_pair_training.target_model import TargetModel, TargetShape  # noqa: E402

TARGET = TargetShape(
    vocabulary=128,
    hidden=64,
    layers=4,
    intermediate=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    key_heads=2,
    value_heads=4,
    key_dim=32,
    value_dim=32,
)
DRAFTER = DrafterShape(
    vocabulary=128,
    hidden=64,
    layers=2,
    intermediate=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    target_layers=4,
    taps=(1, 3),
    window=12,
    selector_rank=8,
)


def scattered(model, scale=0.3, seed=0):
    """The model with parameters large enough that every part of it matters."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                continue
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
            else:
                p.copy_(scale * torch.randn_like(p))
    return model


def rule_inputs(batch=2, length=128, heads=2, ratio=2, key=8, value=6):
    generator = torch.Generator().manual_seed(3)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    q = torch.nn.functional.normalize(random(batch, length, heads, key), dim=-1)
    k = torch.nn.functional.normalize(random(batch, length, heads, key), dim=-1)
    v = random(batch, length, heads, ratio, value)
    log_decay = -torch.nn.functional.softplus(random(batch, length, heads, ratio))
    beta = random(batch, length, heads, ratio).sigmoid()
    return [x.requires_grad_() for x in (q, k, v, log_decay, beta)]


def test_chunked_delta_rule_equals_the_recurrence_with_gradients():
    inputs = rule_inputs()
    expected, got = delta_rule.recurrent(*inputs), delta_rule.chunked(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    gradients = torch.autograd.grad((got * weights).sum(), inputs)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_delta_step_equals_the_recurrence():
    q, k, v, log_decay, beta = (x.detach() for x in rule_inputs(length=10))
    state = torch.zeros(2, 2, 2, 8, 6, dtype=torch.float64)
    steps = [
        delta_rule.step(state, q[:, t], k[:, t], v[:, t], log_decay[:, t], beta[:, t])
        for t in range(10)
    ]
    expected = delta_rule.recurrent(q, k, v, log_decay, beta)
    torch.testing.assert_close(torch.stack(steps, 1), expected)


def test_unit_lower_inverse():
    matrix = torch.randn(3, 64, 64, dtype=torch.float64).tril(-1) * 0.1
    matrix = matrix + torch.eye(64, dtype=torch.float64)
    inverse = delta_rule.unit_lower_inverse(matrix)
    torch.testing.assert_close(inverse @ matrix, torch.eye(64).double().expand(3, -1, -1))


@pytest.mark.parametrize("seed", [0, 1])
def test_packing_equals_mlx(seed):
    mx = pytest.importorskip("mlx.core")
    weight = np.random.default_rng(seed).normal(size=(16, 256)).astype(np.float32)
    weight[0, :64] = 0.0
    weight[1, :64] = np.abs(weight[1, :64])
    q = quantization.quantize(torch.from_numpy(weight), scale_dtype=torch.float32)
    words, scales, biases = mx.quantize(mx.array(weight), group_size=64, bits=4)
    assert np.array_equal(quantization.pack(q.codes).numpy(), np.array(words))
    assert np.array_equal(q.scales.numpy(), np.array(scales))
    assert np.array_equal(q.biases.numpy(), np.array(biases))


def test_stored_scales_dequantize_as_in_mlx():
    mx = pytest.importorskip("mlx.core")
    weight = torch.randn(16, 128)
    q = quantization.quantize(weight)
    assert torch.equal(quantization.unpack(quantization.pack(q.codes)), q.codes.long())
    words = mx.array(quantization.pack(q.codes).numpy())
    scales, biases = (mx.array(x.float().numpy()) for x in (q.scales, q.biases))
    values = np.array(mx.dequantize(words, scales, biases, group_size=64, bits=4))
    np.testing.assert_allclose(quantization.dequantize(q).numpy(), values, rtol=0, atol=1e-6)
    assert torch.equal(
        quantization.fake_quantize(weight), weight + (quantization.dequantize(q) - weight)
    )


def test_exported_target_gives_the_same_logits_in_mlx_lm(tmp_path):
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    model = scattered(TargetModel(TARGET))
    export.export_target(model, tmp_path, tmp_path / "target")
    ids = torch.randint(0, TARGET.vocabulary, (2, 64))
    w = export.load_target(tmp_path / "target", torch.device("cpu")).working(torch.float32)
    expected = w.logits(target_model.forward(w, ids)[0])
    loaded, _ = utils.load_model(tmp_path / "target")
    loaded.set_dtype(mx.float32)
    logits = np.array(loaded(mx.array(ids.numpy())))
    np.testing.assert_allclose(logits, expected.numpy(), rtol=2e-3, atol=2e-3)


def test_silencing_halves_the_start_mark_alone(tmp_path):
    model = scattered(TargetModel(TARGET))
    export.export_target(model, tmp_path, tmp_path / "before")
    export.silence(model)
    export.export_target(model, tmp_path, tmp_path / "after")
    before, after = (
        export.load_target(tmp_path / name, torch.device("cpu")).head
        for name in ("before", "after")
    )
    assert torch.equal(after[export.START], before[export.START] / 2)
    rest = torch.arange(len(before)) != export.START
    assert torch.equal(after[rest], before[rest])


def test_decoding_equals_the_forward_pass():
    w = scattered(TargetModel(TARGET)).working(torch.float32)
    prompts = torch.randint(4, TARGET.vocabulary, (3, 2, 9))
    talks = decoding.Conversations(prompts, torch.tensor([[5, 9], [9, 4], [7, 7]]))
    out = decoding.roll_out(w, talks, torch.zeros(3), 64)
    best = w.logits(target_model.forward(w, out.tokens)[0]).argmax(-1)
    reply = out.turn[:, 1:] > 0
    assert reply.any()
    assert torch.equal(best[:, :-1][reply], out.tokens[:, 1:][reply])
    assert torch.equal(out.tokens[0, :5], prompts[0, 0, :5])
    assert (out.turn[0, :5] == 0).all() and out.turn[0, 5] == 1


def test_decoding_tells_how_likely_each_token_was():
    w = scattered(TargetModel(TARGET)).working(torch.float32)
    talks = decoding.Conversations(torch.randint(4, 128, (3, 1, 9)), torch.tensor([[5], [9], [7]]))
    out = decoding.roll_out(w, talks, torch.tensor([0.0, 0.7, 1.5]), 64, with_nats=True)
    logits = w.logits(target_model.forward(w, out.tokens)[0])[:, :-1]
    expected = -logits.log_softmax(-1).gather(2, out.tokens[:, 1:, None])[..., 0]
    said = out.turn[:, 1:] > 0
    assert said.any()
    torch.testing.assert_close(out.nats[:, 1:][said], expected[said], rtol=1e-3, atol=1e-3)


def test_decoding_continues_with_the_next_prompt():
    w = scattered(TargetModel(TARGET)).working(torch.float32)
    w.head = torch.zeros_like(w.head)
    w.norm = torch.ones_like(w.norm)
    w.head[decoding.END] = 1e-9  # nearly a tie: whatever wins, prompts must be forced
    prompts = torch.arange(10, 30).view(1, 2, 10)
    talks = decoding.Conversations(prompts, torch.tensor([[10, 10]]))
    out = decoding.roll_out(w, talks, torch.full((1,), 5.0), 1024)
    second = (out.turn[0] == 2).int().argmax()
    assert torch.equal(out.tokens[0, second - 10 : second], prompts[0, 1])
    assert out.tokens[0, second - 11] == decoding.END


def test_repeated_fourgrams_stay_inside_a_reply():
    text = [7, 8, 9, 5, 7, 8, 9, 5, 7, 8, 9, 5, 7, 8, 9, 5]
    turn = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    tokens, turns = torch.tensor([text]), torch.tensor([turn], dtype=torch.int8)
    whole, again = decoding.repeated_fourgrams(tokens, turns)
    assert whole[0].nonzero().flatten().tolist() == [7, 8, 9, 10, 11, 15]
    assert again[0].nonzero().flatten().tolist() == [11]
    share = decoding.distinct_share(decoding.Rollouts(tokens, turns))
    assert share.item() == pytest.approx(0.8)


def test_packed_rows_begin_with_a_chat():
    lengths = np.array([30, 50, 20, 40, 60])
    tokens = np.concatenate([np.r_[1, np.full(n - 2, 100 + i), 2] for i, n in enumerate(lengths)])
    rows = pack_rows(Chats(tokens, lengths), 64, 9, np.random.default_rng(0))
    assert rows.shape[1] == 65
    for row in rows:
        assert row[0] == 1
        for at in np.flatnonzero(row[:-1] == 9):
            assert row[at - 1] == 2 and row[at + 1] == 1


def test_drafter_visibility_by_definition():
    context, anchors = torch.arange(5, 37)[None], torch.tensor([[9, 30]])
    visible = drafter_model.visibility(DRAFTER, context, anchors)[0]
    for block, anchor in enumerate(anchors[0].tolist()):
        for row in range(8):
            seen = visible[block * 8 + row]
            for key, position in enumerate(context[0].tolist()):
                assert bool(seen[key]) == (position < anchor and anchor + row - position < 12)
            own = torch.arange(16) // 8 == block
            assert torch.equal(seen[32:], own)


def drafter_block_by_hand(w, features, anchor, token, embedding):
    """One block, one position and one head at a time, for the test only."""
    s = w.shape
    layer_count, width = len(w.layers), s.head_dim

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + s.eps).sqrt() * weight

    def rope(x, position):
        half = width // 2
        angle = position * s.rope_theta ** (-torch.arange(half).float() * 2 / width)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def conv(x, base, change):
        change = change.repeat_interleave(s.conv_group, -1)  # [J, tap, H]
        out = (base[0] + change[:, 0]) * x
        out[1:] += (base[1] + change[1:, 1]) * x[:-1]
        return out

    c = norm(features @ w.fc.T, w.hidden_norm)
    x = embedding[[token] + [s.mask_token] * 7]
    for i in range(layer_count):
        p = w.layers[i]
        n = norm(x, p["input_layernorm"])
        change = (n @ p["attention_conv_projection"].T).view(8, 2, 2, s.groups)
        m = conv(n, p["attention_conv"][0], change[:, 0])
        out = torch.zeros(8, s.heads, width)
        for j in range(8):
            for h in range(s.heads):
                kv = h // (s.heads // s.kv_heads)
                cut = slice(kv * width, (kv + 1) * width)
                q = (m[j] @ p["q_proj"].T)[h * width : (h + 1) * width]
                q = rope(norm(q, p["q_norm"]), anchor + j)
                keys, values = [], []
                for position in range(anchor):
                    if anchor + j - position < s.window:
                        k = norm((c[position] @ p["k_proj"].T)[cut], p["k_norm"])
                        keys.append(rope(k, position))
                        values.append((c[position] @ p["v_proj"].T)[cut])
                for other in range(8):
                    k = norm((m[other] @ p["k_proj"].T)[cut], p["k_norm"])
                    keys.append(rope(k, anchor + other))
                    values.append((m[other] @ p["v_proj"].T)[cut])
                a = (torch.stack(keys) @ q / width**0.5).softmax(0)
                out[j, h] = a @ torch.stack(values)
        out = out.flatten(1) @ p["o_proj"].T
        x = x + conv(out, p["attention_conv"][1], change[:, 1])
        n = norm(x, p["post_attention_layernorm"])
        change = (n @ p["mlp_conv_projection"].T).view(8, 2, 2, s.groups)
        m = conv(n, p["mlp_conv"][0], change[:, 0])
        m = torch.nn.functional.silu(m @ p["gate_proj"].T) * (m @ p["up_proj"].T)
        x = x + conv(m @ p["down_proj"].T, p["mlp_conv"][1], change[:, 1])
    return norm(x[1:], w.norm)


def test_drafter_forward_by_definition():
    w = scattered(DrafterModel(DRAFTER), scale=0.2).requires_grad_(False).working(torch.float32)
    torch.manual_seed(1)
    features, embedding = torch.randn(1, 32, 128), torch.randn(128, 64)
    anchors, tokens = torch.tensor([[6, 21]]), torch.tensor([[11, 12]])
    got = drafter_model.forward(w, features, torch.zeros(1).long(), anchors, tokens, embedding)
    for i in range(2):
        anchor, token = int(anchors[0, i]), int(tokens[0, i])
        expected = drafter_block_by_hand(w, features[0], anchor, token, embedding)
        torch.testing.assert_close(got[0, i], expected, rtol=1e-4, atol=1e-4)
    shifted = drafter_model.forward(
        w, features[:, 8:], torch.tensor([8]), anchors[:, 1:], tokens[:, 1:], embedding
    )
    torch.testing.assert_close(shifted[0, 0], got[0, 1], rtol=1e-4, atol=1e-4)


def test_exported_drafter_loads_again(tmp_path):
    model = scattered(DrafterModel(DRAFTER))
    export.export_drafter(model, tmp_path)
    again = export.load_drafter(tmp_path, torch.device("cpu"))
    assert again.shape == DRAFTER
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.detach().bfloat16().float())


def test_a_drafter_is_trained_on_from_one_with_fewer_layers(tmp_path):
    export.export_drafter(scattered(DrafterModel(DRAFTER)), tmp_path)
    model = DrafterModel(replace(DRAFTER, layers=3))
    fresh = model.layers[2]["gate_proj"].detach().clone()
    train_drafter.start_from(model, tmp_path)
    other = export.load_drafter(tmp_path, torch.device("cpu"))
    assert torch.equal(model.fc, other.fc)
    assert torch.equal(model.layers[1]["q_proj"], other.layers[1]["q_proj"])
    assert torch.equal(model.layers[2]["gate_proj"], fresh)
    with pytest.raises(ValueError, match="other sizes"):
        train_drafter.start_from(DrafterModel(replace(DRAFTER, window=9)), tmp_path)


def test_greedy_draft_and_verify_equals_plain_decoding():
    w = scattered(TargetModel(TARGET)).requires_grad_(False).working(torch.float32)
    drafter = scattered(DrafterModel(DRAFTER)).requires_grad_(False).working(torch.float32)
    prompts = torch.randint(4, TARGET.vocabulary, (2, 1, 6))
    talks = decoding.Conversations(prompts, torch.tensor([[4], [6]]))
    plain = decoding.roll_out(w, talks, torch.zeros(2), 64).tokens
    passes, text = speculative.draft_and_verify(w, drafter, talks, 0.0, 64, 5)
    assert passes.passes > 0
    for row in range(2):
        stop = int((text[row] != 0).nonzero().max()) + 1
        assert torch.equal(text[row, :stop], plain[row, :stop])


def test_rejection_sampling_keeps_the_target_distribution():
    torch.manual_seed(0)
    rows, vocabulary = 200_000, 5
    logits = torch.randn(8, vocabulary).expand(rows, -1, -1)
    ids = torch.arange(4).expand(rows, 7, -1)
    q = torch.rand(7, 4).softmax(-1).double().expand(rows, -1, -1)
    path = torch.multinomial(q[0], rows, replacement=True).T
    draft = drafter_model.Draft(path, ids, q)
    accepted, token = speculative._verify(logits, draft, 0.7)
    first = torch.where(accepted > 0, path[:, 0], token)
    share = torch.bincount(first, minlength=vocabulary) / rows
    expected = (logits[0, 0] / 0.7).softmax(-1)
    torch.testing.assert_close(share, expected, atol=0.006, rtol=0)
