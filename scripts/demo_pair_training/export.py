"""Checkpoint folders: the target as mlx-lm loads it (qwen3_5, 4-bit), the drafter as DFlash2."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .drafter_model import DrafterModel, DrafterShape
from .quantization import BITS, GROUP, Quantized, dequantize, pack, quantize, unpack
from .target_model import (
    ATTENTION_MATRICES,
    MATRICES,
    MLP_MATRICES,
    TargetModel,
    TargetShape,
)

END, MAX_POSITIONS = 2, 4096
START = 1  # <|im_start|>
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PREFIX = "language_model.model."


def _path(name: str, attention: bool) -> str:
    """Where a layer's parameter lies in the checkpoint, without the layer and the suffix."""
    if name in MLP_MATRICES:
        return f"mlp.{name}"
    if name in ("input_layernorm", "post_attention_layernorm"):
        return name
    return f"{'self_attn' if attention else 'linear_attn'}.{name}"


def _target_keys(shape: TargetShape) -> dict[str, tuple[str, str]]:
    """Model parameter name -> (checkpoint key without ``.weight``, parameter's own name)."""
    keys = {
        "embedding": (f"{PREFIX}embed_tokens", "embedding"),
        "head": ("language_model.lm_head", "head"),
        "norm": (f"{PREFIX}norm", "final_norm"),
    }
    for i, layer in enumerate(TargetModel(shape).layers):
        for name in layer:
            path = _path(name, shape.is_attention(i))
            keys[f"layers.{i}.{name}"] = (f"{PREFIX}layers.{i}.{path}", name)
    return keys


def _is_packed(name: str) -> bool:
    return name in MATRICES or name in ("embedding", "head")


def target_tensors(model: TargetModel) -> dict[str, Tensor]:
    """The checkpoint: packed matrices; other tensors bf16, ``A_log`` fp32."""
    tensors = {}
    state = model.state_dict()
    for parameter, (key, name) in _target_keys(model.shape).items():
        value = state[parameter].detach()
        if _is_packed(name):
            q = quantize(value)
            tensors[f"{key}.weight"] = pack(q.codes)
            tensors[f"{key}.scales"], tensors[f"{key}.biases"] = q.scales, q.biases
        elif name == "A_log":
            tensors[key] = value.float()
        elif name == "dt_bias":
            tensors[key] = value.bfloat16()
        elif name == "conv1d":
            tensors[f"{key}.weight"] = value.bfloat16()[..., None]
        else:
            tensors[f"{key}.weight"] = value.bfloat16()
    return {key: value.cpu().contiguous() for key, value in tensors.items()}


@torch.no_grad()
def silence(model: TargetModel) -> None:
    """Halve the start mark's row of the head, so that no reply says it.

    Where the mark belongs, between turns, its logit is more than twice that of all other tokens.
    """
    model.head[START] *= 0.5


def target_config(s: TargetShape) -> dict:
    half = int(s.head_dim * s.rotary_fraction) // 2
    sections = [(half + 2) // 3, (half + 1) // 3, half // 3]  # text has one position: no effect
    quantization = {"group_size": GROUP, "bits": BITS}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "eos_token_id": [END],
        "quantization": quantization,
        "quantization_config": quantization,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": s.hidden,
            "intermediate_size": s.intermediate,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "rms_norm_eps": s.eps,
            "vocab_size": s.vocabulary,
            "max_position_embeddings": MAX_POSITIONS,
            "linear_num_value_heads": s.value_heads,
            "linear_num_key_heads": s.key_heads,
            "linear_key_head_dim": s.key_dim,
            "linear_value_head_dim": s.value_dim,
            "linear_conv_kernel_dim": s.conv_kernel,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "full_attention_interval": s.attention_every,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": s.rope_theta,
                "partial_rotary_factor": s.rotary_fraction,
                "mrope_section": sections,
            },
        },
    }


def _write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "mlx"})
    path.chmod(0o644)


def export_target(model: TargetModel, tokenizer: Path, folder: Path) -> None:
    """Write the target's folder; ``tokenizer`` is the folder of its tokenizer files."""
    _write(folder, target_config(model.shape), target_tensors(model))
    generation = {"temperature": 0.7, "top_p": 0.95, "eos_token_id": [END]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)


def target_shape(folder: Path) -> TargetShape:
    """The sizes written in a target folder's configuration."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    return TargetShape(
        vocabulary=text["vocab_size"],
        hidden=text["hidden_size"],
        layers=text["num_hidden_layers"],
        intermediate=text["intermediate_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        rotary_fraction=text["rope_parameters"]["partial_rotary_factor"],
        rope_theta=text["rope_parameters"]["rope_theta"],
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
        attention_every=text["full_attention_interval"],
        eps=text["rms_norm_eps"],
    )


def load_target(folder: Path, device: torch.device) -> TargetModel:
    """The exported target with its 4-bit values as fp32 parameters, frozen."""
    shape, tensors = target_shape(folder), load_file(folder / "model.safetensors")
    state = {}
    for parameter, (key, name) in _target_keys(shape).items():
        if _is_packed(name):
            codes = unpack(tensors[f"{key}.weight"])
            state[parameter] = dequantize(
                Quantized(codes, tensors[f"{key}.scales"], tensors[f"{key}.biases"])
            )
        else:
            value = tensors[key] if name in ("A_log", "dt_bias") else tensors[f"{key}.weight"]
            state[parameter] = value.float().squeeze(-1) if name == "conv1d" else value.float()
    model = TargetModel(shape)
    model.load_state_dict(state)
    return model.to(device).requires_grad_(False)


DRAFTER_KEYS = {
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "attention_conv": "attention_conv.base_kernel",
    "attention_conv_projection": "attention_conv.kernel_projection.weight",
    "mlp_conv": "mlp_conv.base_kernel",
    "mlp_conv_projection": "mlp_conv.kernel_projection.weight",
    **{name: f"self_attn.{name}.weight" for name in (*ATTENTION_MATRICES, "q_norm", "k_norm")},
    **{name: f"mlp.{name}.weight" for name in MLP_MATRICES},
}
SELECTOR_KEYS = {
    "fc": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "predecessor": "candidate_selector.predecessor_codebook",
    "successor": "candidate_selector.successor_codebook",
    "selector_projection": "candidate_selector.hidden_projection.weight",
}


def _drafter_keys(shape: DrafterShape) -> dict[str, str]:
    """Model parameter name -> published tensor name."""
    layers = {
        f"layers.{i}.{name}": f"layers.{i}.{key}"
        for i in range(shape.layers)
        for name, key in DRAFTER_KEYS.items()
    }
    return SELECTOR_KEYS | layers


def drafter_config(s: DrafterShape) -> dict:
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "is_causal": False,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.intermediate,
        "vocab_size": s.vocabulary,
        "num_target_layers": s.target_layers,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": s.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_theta},
        "sliding_window": s.window,
        "layer_types": ["sliding_attention"] * s.layers,
        "dflash_config": {
            "block_size": s.block,
            "mask_token_id": s.mask_token,
            "target_layer_ids": list(s.taps),
            "conv_kernel_size": 2,
            "conv_group_size": s.conv_group,
            "selector_rank": s.selector_rank,
            "selector_top_k": s.selector_top_k,
        },
    }


def export_drafter(model: DrafterModel, folder: Path) -> None:
    """Write the drafter's folder in bf16 under the published tensor names."""
    state, keys = model.state_dict(), _drafter_keys(model.shape)
    tensors = {keys[k]: v.detach().bfloat16().cpu().contiguous() for k, v in state.items()}
    _write(folder, drafter_config(model.shape), tensors)


def load_drafter(folder: Path, device: torch.device) -> DrafterModel:
    """The exported drafter as fp32 parameters, frozen."""
    c = json.loads((folder / "config.json").read_text())
    d = c["dflash_config"]
    shape = DrafterShape(
        vocabulary=c["vocab_size"],
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        intermediate=c["intermediate_size"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        rope_theta=c["rope_parameters"]["rope_theta"],
        target_layers=c["num_target_layers"],
        taps=tuple(d["target_layer_ids"]),
        window=c["sliding_window"],
        block=d["block_size"],
        mask_token=d["mask_token_id"],
        conv_group=d["conv_group_size"],
        selector_rank=d["selector_rank"],
        selector_top_k=d["selector_top_k"],
        eps=c["rms_norm_eps"],
    )
    tensors = load_file(folder / "model.safetensors")
    model = DrafterModel(shape)
    model.load_state_dict({k: tensors[v].float() for k, v in _drafter_keys(shape).items()})
    return model.to(device).requires_grad_(False)
