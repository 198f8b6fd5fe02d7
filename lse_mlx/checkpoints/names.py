"""What files and keys are called, and what a drafter is known by. Needs the standard library only."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "source-repository.json"
"""What a conversion says of its source."""

QUANTIZATION = ("quantization", "quantization_config")
"""The keys of a config.json that describe codes; the second one repeats the first."""
FLOATS = ("BF16", "F16", "F32")
"""The types of weights that are no codes, as safetensors calls them."""
GROUP_SIZE = 64
"""Consecutive columns that share a scale and a bias, in what is converted here."""

ARCHITECTURE = "DFlash2DraftModel"
CODEBOOKS = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
"""Published under these names; a conversion adds `.weight`, which makes them matrices like others."""


def is_dflash2(architectures: object) -> bool:
    """Whether the `architectures` of a config.json, a list or the one name, are a DFlash2 drafter."""
    return ARCHITECTURE in (architectures if isinstance(architectures, list) else [architectures])
