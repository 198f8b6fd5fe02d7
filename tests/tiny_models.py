"""Tiny random checkpoints on disk, mlx-lm's own reading of them, and drafters that record.

The weights are random but lively: greedy replies wander and the top logits are well apart.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3, qwen3_5, qwen3_5_moe
from mlx_lm.utils import load_model, quantize_model
from numpy.typing import NDArray
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from lse_mlx.drafters.base import Proposal, Uniform
from lse_mlx.drafters.scripted import ScriptedContext, ScriptedDrafter
from lse_mlx.target.loading import load_target
from lse_mlx.target.model import Target

VOCAB = 97
KINDS = ("bf16", "q4", "mixed", "tied", "vision", "qwen3", "moe", "moe-q4", "moe-vision")
"""What `save_checkpoint` can build: a hybrid in bf16, 4-bit, or 4-bit with an 8-bit head and
outputs, one with tied embeddings, one as a multimodal folder in the original layout, and a model
of attention alone. Then hybrids of experts in bf16, in 4-bit with 8-bit routers as mlx-lm makes
them, and as a multimodal folder in the original layout."""

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
"""What a mixture's config has besides TEXT_CONFIG."""
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{{ '<|start|>' + m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"
)


@contextmanager
def on_cpu() -> Iterator[None]:
    """MLX's default device is the CPU inside, as on a machine without an accelerator."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    try:
        yield
    finally:
        mx.set_default_device(before)


def config_of(kind: str) -> dict[str, Any]:
    """config.json of a checkpoint of `kind`, before any quantization."""
    text = json.loads(json.dumps(TEXT_CONFIG))
    if kind == "qwen3":
        kept = {k: v for k, v in text.items() if not k.startswith(("linear_", "full_"))}
        return kept | {"model_type": "qwen3", "tie_word_embeddings": True, "num_hidden_layers": 3}
    if kind.startswith("moe"):
        text |= EXPERTS
    if kind.endswith("vision"):
        mixture = kind.startswith("moe")
        return {
            "model_type": "qwen3_5_moe" if mixture else "qwen3_5",
            "architectures": [f"Qwen3_5{'Moe' if mixture else ''}ForConditionalGeneration"],
            "text_config": text,
            "vision_config": {"hidden_size": 32, "depth": 1},
            "eos_token_id": [3, 5],
        }
    return text | {"tie_word_embeddings": kind == "tied", "eos_token_id": 3}


def save_checkpoint(folder: Path, kind: str = "bf16", seed: int = 0) -> Path:
    """Write a checkpoint of `kind` (one of KINDS) to `folder` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(kind)
    with on_cpu():
        model = _random_model(config, seed)
        if kind in ("q4", "mixed", "moe-q4"):
            model, config = _quantized(model, config, mixed=kind == "mixed")
        weights = dict(tree_flatten(model.parameters()))
        if kind.endswith("vision"):
            weights = _original_layout(weights)
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    if "text_config" not in config and config["model_type"] != "qwen3":
        config["model_type"] = config["model_type"].removesuffix("_text") + "_text"
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def load_tiny(
    folder: Path, context_length: int | None = None, on_host: bool | None = None
) -> Target:
    """The target in `folder` as the project loads it on a CPU, or there in its device form."""
    with on_cpu():
        return load_target(folder, context_length, on_host)


def load_reference(folder: Path) -> nn.Module:
    """mlx-lm's own model of `folder`, computing in fp32 (quantized layers from fp32 scales)."""
    kind = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    with on_cpu():
        model, _ = load_model(folder, model_config={"model_type": kind.removesuffix("_text")})
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        return model.eval()


def reference_greedy(
    model: nn.Module, prompt: Sequence[int], count: int
) -> tuple[list[int], float]:
    """Greedy decoding by mlx-lm's forward over the whole sequence for every token.

    Returns the tokens and the smallest distance of the two best logits on the way.
    """
    tokens, closest = list(prompt), float("inf")
    for _ in range(count):
        with on_cpu():
            row = np.array(model(mx.array([tokens]))[0, -1])
        best, second = np.argsort(-row, kind="stable")[:2]
        closest = min(closest, float(row[best] - row[second]))
        tokens.append(int(best))
    return tokens[len(prompt) :], closest


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` token ids of the tiny vocabulary."""
    return np.random.default_rng([seed, length]).integers(8, VOCAB, length).tolist()


def _random_model(config: dict[str, Any], seed: int) -> nn.Module:
    family = config["model_type"].removesuffix("_text")
    module = {"qwen3": qwen3, "qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}[family]
    config = config | {"model_type": family}
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    rng = np.random.default_rng(seed)
    # A tied embedding is also the head: a large one would only ever repeat the last token.
    scale = 0.25 if config.get("tie_word_embeddings") else 1.0
    flat: Any = tree_flatten(model.parameters())
    drawn = [
        (name, mx.array(_random_weight(rng, name, tuple(old.shape), scale)).astype(mx.bfloat16))
        for name, old in flat
    ]
    model.load_weights([(n, w.astype(mx.float32) if "A_log" in n else w) for n, w in drawn])
    return model


def _random_weight(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], scale: float
) -> NDArray[np.float32]:
    draw = rng.standard_normal(shape)
    if "A_log" in name:  # decays from slow to fast
        draw = np.log(rng.uniform(0.02, 1.5, shape))
    elif "norm" in name:
        draw = 1 + 0.2 * draw
    elif "conv1d" in name:
        draw *= 0.6
    elif "embed" in name:
        draw *= scale
    elif len(shape) in (2, 3):  # a matrix, or one for each expert
        draw *= (2.0 if "lm_head" in name else 1.2) / np.sqrt(shape[-1])
    return draw.astype(np.float32)


def _quantized(
    model: nn.Module, config: dict[str, Any], mixed: bool
) -> tuple[nn.Module, dict[str, Any]]:
    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path.endswith("in_proj_b"):
            return False  # some layers of real checkpoints stay as they are
        wide = path.endswith(("lm_head", "o_proj", "out_proj"))
        return {"group_size": 32, "bits": 8} if wide else True

    return quantize_model(model, config, 64, 4, quant_predicate=predicate if mixed else None)


def _original_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Names and layouts as they were before mlx-lm converts a multimodal model."""
    original = {
        "model.visual.patch_embed.proj.weight": mx.ones((8, 3)),
        "mtp.fc.weight": mx.ones((64, 128)),
    }
    for name, weight in weights.items():
        if "conv1d" in name:
            weight = weight.moveaxis(2, 1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            weight = weight - 1
        name = name.replace("language_model.model.", "model.language_model.")
        original[name.replace("language_model.lm_head", "lm_head")] = weight
    for name in [name for name in original if name.endswith("switch_mlp.gate_proj.weight")]:
        stem = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up = original.pop(name), original.pop(f"{stem}switch_mlp.up_proj.weight")
        original[f"{stem}experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        original[f"{stem}experts.down_proj"] = original.pop(f"{stem}switch_mlp.down_proj.weight")
    return original


def save_tokenizer(folder: Path, template: bool = True) -> Path:
    """Write a byte-level BPE tokenizer of 262 tokens to `folder` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n")]
    vocab = {t: i for i, t in enumerate(["<|end|>", "<|start|>", "<|pad|>", *letters])}
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    raw = RawTokenizer(models.BPE(vocab, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|end|>", "<|start|>", "<|pad|>"])
    raw.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    about |= {"chat_template": CHAT_TEMPLATE} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), "utf-8")
    return folder


def save_words(folder: Path) -> None:
    """Write a tokenizer of exactly as many tokens as the tiny targets have: t0, t1, ..."""
    raw = RawTokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t3"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), "utf-8")


@dataclass
class RecordingContext:
    """A scripted context that also keeps the features it was given."""

    inner: ScriptedContext
    rows: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.inner.position

    def append(self, features: mx.array, first: int) -> None:
        self.inner.append(features, first)
        self.rows = [*self.rows[:first], *np.array(features)]

    def propose(self, anchor: int, temperature: float, uniform: Uniform) -> Proposal:
        return self.inner.propose(anchor, temperature, uniform)


@dataclass(frozen=True)
class RecordingDrafter:
    """A scripted drafter whose contexts keep the features they were given."""

    scripted: ScriptedDrafter
    name: str = "recording"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.scripted.taps

    @property
    def depth(self) -> int:
        return self.scripted.depth

    def new_context(self) -> RecordingContext:
        return RecordingContext(self.scripted.new_context())
