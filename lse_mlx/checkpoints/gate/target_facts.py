"""What a target's files say of it: its config, its tensors' headers, and its tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lse_mlx.checkpoints.checks import NOTHING, Check, Words, shown
from lse_mlx.checkpoints.complete import weight_files
from lse_mlx.checkpoints.gate.tokenizer_identity import TokenizerIdentity, read_tokenizer
from lse_mlx.checkpoints.names import FLOATS
from lse_mlx.checkpoints.safetensors_header import StoredTensor, read_header
from lse_mlx.checkpoints.target_config import check_supported, read_config
from lse_mlx.errors import CheckpointError, printable

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
AFFINE = (64, 4)
"""Group size and bits that mlx-lm takes where a quantization block names none."""


@dataclass(frozen=True)
class TargetFacts:
    """A target as its files describe it.

    hidden_size, vocab_size, layer_count: of its config.json
    tensors: every stored tensor of its text part, by the name without a multimodal prefix
    tied: whether the embedding is also the output head
    quantization: its quantization block, empty where it has none
    """

    hidden_size: int
    vocab_size: int
    layer_count: int
    tensors: dict[str, StoredTensor]
    tied: bool
    quantization: dict[str, Any]
    tokenizer: TokenizerIdentity

    def tensor_checks(self, hidden_size: object, vocab_size: object) -> list[Check]:
        """What a drafter shares with its target, held to the target's stored tensors.

        hidden_size, vocab_size: what the drafter's config.json says
        """
        shape = [vocab_size, hidden_size]
        embedding = self._matrix(EMBEDDING)
        head = embedding if self.tied else self._matrix(HEAD)
        says = "the target stores"
        return [
            Check.equal("embedding", shape, embedding, says),
            Check.equal("output head", shape, head, says),
        ]

    def layer_check(self, num_target_layers: object) -> Check:
        """The number of layers that a drafter says its target has, held to the stored ones."""
        stored = sorted({i for name in self.tensors if (i := _layer(name)) is not None})
        whole = stored == list(range(len(stored)))
        found = len(stored) if whole else Words(f"layers {stored}, not one after the other")
        says = "the target stores"
        return Check.equal("stored target layers", num_target_layers, found, says)

    def _matrix(self, module: str) -> object:
        """[rows, columns] of a stored matrix; Words where it is none, NOTHING where it is missing."""
        weight = self.tensors.get(f"{module}.weight")
        if weight is None:
            return NOTHING
        if weight.dtype in FLOATS:
            return list(weight.shape)
        parts = [
            None if tensor is None else list(tensor.shape)
            for part in ("weight", "scales", "biases")
            for tensor in [self.tensors.get(f"{module}.{part}")]
        ]
        described = f"{weight.dtype} {parts[0]}, scales {parts[1]} and biases {parts[2]}"
        settings = self._settings(module)
        if weight.dtype != "U32" or len(weight.shape) != 2 or settings is None:
            return Words(f"{described}, which its quantization block does not explain")
        group_size, bits, affine = settings
        rows, columns = weight.shape[0], weight.shape[1] * 32 // bits
        expected = [rows, columns // group_size]
        if weight.shape[1] * 32 % bits or columns % group_size or parts[1] != expected:
            return Words(f"{described}, which {bits} bits in groups of {group_size} are not")
        if parts[2] != (expected if affine else None):
            return Words(f"{described}, which do not fit each other")
        return [rows, columns]

    def _settings(self, module: str) -> tuple[int, int, bool] | None:
        """Group size, bits and whether there are biases, of one module's codes."""
        block = self.quantization
        for prefix in ("", "language_model."):  # the module's own settings, as mlx-lm names it
            own = self.quantization.get(prefix + module)
            block = own if isinstance(own, dict) else block
        if not block:
            return None
        group_size, bits = block.get("group_size", AFFINE[0]), block.get("bits", AFFINE[1])
        if type(group_size) is not int or type(bits) is not int or group_size < 1 or bits < 1:
            return None
        return group_size, bits, block.get("mode", "affine") == "affine"


def read_target(folder: Path) -> TargetFacts:
    """Read the facts of the target in `folder`: JSON files and headers, no tensor.

    Raises CheckpointError if it is no supported target, or if a file is missing or damaged.
    """
    config = read_config(folder)
    text = check_supported(config, folder)
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    return TargetFacts(
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        layer_count=text["num_hidden_layers"],
        tensors=_text_tensors(_read_headers(folder)),
        tied=text.get("tie_word_embeddings", False) is True,
        quantization=quantization if isinstance(quantization, dict) else {},
        tokenizer=read_tokenizer(folder),
    )


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all model*.safetensors, which is what a target is loaded from."""
    paths = sorted(folder.glob("model*.safetensors"))
    absent = {path.name for path in weight_files(folder)} - {path.name for path in paths}
    if unread := [name for name in absent if (folder / name).exists()]:
        raise CheckpointError(
            f"{folder} keeps weights in {printable(min(unread))}, but only files called "
            "model*.safetensors are loaded: use another build of this checkpoint."
        )
    if absent or not paths:
        raise CheckpointError(
            f"{folder} has no {printable(min(absent, default='model*.safetensors'))}: "
            "download the weights of this checkpoint."
        )
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        held = read_header(path).tensors
        if twice := tensors.keys() & held.keys():
            raise CheckpointError(
                f"{printable(str(path))} holds the tensor {shown(Words(min(twice)))}, as another "
                "file beside it does: download the checkpoint into an empty folder."
            )
        tensors |= held
    return tensors


def _text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the text model under the plain names `model.*` and `lm_head.*`.

    Multimodal checkpoints have them under `language_model.`, or under `model.language_model.` as
    first published. What else such files hold (a vision tower, an MTP head) is left out.
    """
    kept = {}
    for name, tensor in stored.items():
        if "mtp." in name or name.startswith(("vision_tower", "model.visual")):
            continue
        if name.startswith("model.language_model."):
            name = name.replace("model.language_model", "model", 1)
        kept[name.removeprefix("language_model.")] = tensor
    return kept


def _layer(name: str) -> int | None:
    """The layer that a tensor belongs to, None for others."""
    parts = name.split(".")
    numbered = len(parts) > 2 and parts[2].isdecimal() and len(parts[2]) < 10
    return int(parts[2]) if numbered and parts[:2] == ["model", "layers"] else None
