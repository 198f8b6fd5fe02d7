"""The published drafter: sizes from its geometry alone, and its conversion where it is at hand."""

import hashlib
import os
from itertools import pairwise
from pathlib import Path

import pytest

from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.conversion.manifest import Manifest
from lse_mlx.checkpoints.conversion.plan import plan_conversion
from lse_mlx.checkpoints.progress import Silent
from lse_mlx.checkpoints.safetensors_header import StoredTensor, header_bytes, read_header
from tests.checkpoints.conversion.conversion_sources import CONFIG

REPOSITORY = "incoai/Qwen3.8-27B-DFlash2"
REVISION = "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
SOURCE_BYTES, SOURCE_SHA256 = (
    3_848_817_896,
    "67fc76d68dc5a9415511a4f394ef744d67510cd20e93b37cc2cc7d28e4bab65c",
)
OUTPUT_BYTES = 2_044_950_184
OUTPUT_SHA256 = {
    "model.safetensors": "cc3b5742f8edf02c4edcc734ef66e7c4c5f660b43438641ee36c5a72f8414188",
    "config.json": "411ffd1c02c210843385cd9eb5784554d0c982c8878669083c5e58258073a65d",
    "source-repository.json": "e85ae6a22b772666a068cb5669ec409b1ffae3a51c73210e9d288b8e9f138959",
}

WHOLE = {
    "candidate_selector.hidden_projection.weight": (256, 5120),
    "candidate_selector.predecessor_codebook": (248320, 256),
    "candidate_selector.successor_codebook": (248320, 256),
    "fc.weight": (5120, 25600),
    "hidden_norm.weight": (5120,),
    "norm.weight": (5120,),
}
LAYER = {
    "input_layernorm.weight": (5120,),
    "post_attention_layernorm.weight": (5120,),
    "self_attn.q_proj.weight": (4096, 5120),
    "self_attn.k_proj.weight": (1024, 5120),
    "self_attn.v_proj.weight": (1024, 5120),
    "self_attn.o_proj.weight": (5120, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (17408, 5120),
    "mlp.up_proj.weight": (17408, 5120),
    "mlp.down_proj.weight": (5120, 17408),
    "attention_conv.base_kernel": (2, 2, 5120),
    "mlp_conv.base_kernel": (2, 2, 5120),
    "attention_conv.kernel_projection.weight": (1280, 5120),
    "mlp_conv.kernel_projection.weight": (1280, 5120),
}


def real_tensors() -> dict[str, StoredTensor]:
    shapes: dict[str, tuple[int, ...]] = dict(WHOLE)
    for layer in range(5):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    tensors, place = {}, 0
    for name in sorted(shapes):
        size = 2
        for axis in shapes[name]:
            size *= axis
        tensors[name] = StoredTensor("BF16", shapes[name], place, place + size)
        place += size
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of the real size, all of it a hole in the file but the header."""
    folder = tmp_path_factory.mktemp("real") / "source"
    folder.mkdir()
    (folder / "config.json").write_text(str(CONFIG).replace("'", '"'))
    tensors = real_tensors()
    path = folder / "model.safetensors"
    path.write_bytes(header_bytes(tensors))
    os.truncate(path, path.stat().st_size + sum(t.size for t in tensors.values()))
    return folder


def test_the_source(source: Path) -> None:
    header = read_header(source / "model.safetensors")
    assert len(header.tensors) == 81
    assert header.payload_start == 8_936 and header.file_size == SOURCE_BYTES
    assert sum(t.size for t in header.tensors.values()) == 3_848_808_960 == 2 * 1_924_404_480


@pytest.mark.parametrize(("bits", "size"), [(8, OUTPUT_BYTES), (4, None)])
def test_the_conversion(source: Path, bits: int, size: int | None) -> None:
    plan = plan_conversion(source, bits)
    quantized = [tensor for tensor in plan.tensors if tensor.quantized]
    assert (len(plan.tensors), len(quantized), plan.output_tensors) == (81, 49, 179)
    assert plan.quantized_bytes == 3_848_273_920
    assert sum(t.source.size for t in plan.tensors if not t.quantized) == 535_040
    if size is None:
        # Half a byte a value, and four bytes a group of 64.
        size = len(plan.header) + 3_848_273_920 // 4 + 3_848_273_920 // 32 + 535_040
    else:
        assert len(plan.header) == 19_624
    assert plan.output_bytes == size


def test_the_order_of_the_new_file(source: Path) -> None:
    plan = plan_conversion(source)
    names = [name for tensor in plan.tensors for name in tensor.outputs]
    assert names[:7] == [
        "candidate_selector.hidden_projection.weight",
        "candidate_selector.hidden_projection.scales",
        "candidate_selector.hidden_projection.biases",
        "candidate_selector.predecessor_codebook.weight",
        "candidate_selector.predecessor_codebook.scales",
        "candidate_selector.predecessor_codebook.biases",
        "candidate_selector.successor_codebook.weight",
    ]
    outputs = [tensor for planned in plan.tensors for tensor in planned.outputs.values()]
    assert outputs[0] == StoredTensor("U32", (256, 1280), 0, 1_310_720)
    assert outputs[1] == StoredTensor("BF16", (256, 80), 1_310_720, 1_351_680)
    assert all(a.end == b.begin for a, b in pairwise(outputs))
    assert outputs[-1].end == 2_044_930_560


def test_the_manifest() -> None:
    manifest = Manifest(
        source_repository=REPOSITORY,
        source_revision=REVISION,
        source_sha256=SOURCE_SHA256,
        reference_implementation="https://github.com/z-lab/dflash/blob/"
        "07ebd93db9f472af339b644bb70221ad8428328a/dflash/model_mlx.py",
        format="MLX affine Q8 group64",
        conversion="FP32 min/max; BF16 scale and bias; codes selected against stored scale/bias",
        bytes=OUTPUT_BYTES,
        sha256=OUTPUT_SHA256["model.safetensors"],
        tensors=179,
    )
    text = manifest.text().encode()
    assert len(text) == 592
    assert hashlib.sha256(text).hexdigest() == OUTPUT_SHA256["source-repository.json"]


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_the_published_checkpoint(tmp_path: Path) -> None:
    real = os.environ.get("LSE_DFLASH2_CONVERT_SOURCE")
    reference = os.environ.get("LSE_DFLASH2_CONVERT_REFERENCE")
    if not real:
        pytest.skip(
            "the published checkpoint was not converted: LSE_DFLASH2_CONVERT_SOURCE does not name "
            "its folder (and LSE_DFLASH2_CONVERT_REFERENCE that of a conversion to compare with)"
        )
    weights = Path(real) / "model.safetensors"
    assert (weights.stat().st_size, hash_of(weights)) == (SOURCE_BYTES, SOURCE_SHA256)
    made = tmp_path / "converted"
    convert(Path(real), made, REPOSITORY, REVISION, progress=Silent())
    assert (made / "model.safetensors").stat().st_size == OUTPUT_BYTES
    assert {name: hash_of(made / name) for name in OUTPUT_SHA256} == OUTPUT_SHA256
    if reference:
        other = {name: hash_of(Path(reference) / name) for name in OUTPUT_SHA256}
        assert other == OUTPUT_SHA256
