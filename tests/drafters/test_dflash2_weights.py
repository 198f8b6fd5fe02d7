"""Every tensor is there, of its shape and dtype, and none besides; damaged files are refused."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lse_mlx.drafters.dflash2 import DFlash2, DFlash2Config, load_dflash2
from lse_mlx.drafters.dflash2.weights import DFlash2Weights, Matrix
from lse_mlx.errors import CheckpointError
from tests.drafters.tiny_dflash2 import (
    dense64,
    quantize,
    random_features,
    save,
    shared,
    tiny_config,
    tiny_target,
    tiny_tensors,
)

Q4 = {"group_size": 32, "bits": 4}
BOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load(folder: Path, tensors: dict[str, mx.array], **config: object) -> DFlash2:
    return load_dflash2(save(folder, tiny_config(**config), tensors), shared(tiny_target()))


def draft(drafter: DFlash2) -> list[int]:
    context = drafter.new_context()
    context.append(mx.array(random_features(9)), 0)
    return context.propose(5, 0.0, lambda: 0.5).tokens


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_codebooks_by_either_name_and_floats_of_other_widths(
    tmp_path: Path, dtype: mx.Dtype
) -> None:
    tensors = tiny_tensors()
    expected = draft(load(tmp_path / "published", tensors))
    renamed = {f"{k}.weight" if k in BOOKS else k: v for k, v in tensors.items()}
    assert draft(load(tmp_path / "renamed", renamed)) == expected
    wider = {k: v.astype(mx.float32).astype(dtype) for k, v in tensors.items()}
    if dtype == mx.float32:  # bf16 values are fp32 values; in fp16 small ones are rounded
        assert draft(load(tmp_path / "wider", wider)) == expected
    else:
        assert len(draft(load(tmp_path / "wider", wider))) == 7


def test_some_matrices_may_stay_floats_in_a_quantized_checkpoint(tmp_path: Path) -> None:
    tensors, mixed = tiny_tensors(), quantize(tiny_tensors(), bits=4)
    for name in ("fc", "layers.1.self_attn.k_proj", BOOKS[0]):
        for part in ("weight", "scales", "biases"):
            del mixed[f"{name}.{part}"]
        kept = name if name in BOOKS else f"{name}.weight"
        mixed[kept] = tensors[kept]
    assert len(draft(load(tmp_path, mixed, quantization=Q4))) == 7


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_codebook_are_decoded_by_the_definition(tmp_path: Path, bits: int) -> None:
    tensors = quantize(tiny_tensors(), bits)
    values = tiny_config(quantization={"group_size": 32, "bits": bits})
    weights = DFlash2Weights.read(save(tmp_path, values, tensors), DFlash2Config.parse(values))
    book, expected = weights.matrices[f"{BOOKS[0]}.weight"], dense64(tensors, bits)[BOOKS[0]]
    ids = mx.array([[198, 0], [7, 7]])
    np.testing.assert_allclose(np.array(book.rows(ids)), expected[np.array(ids)], atol=1e-6)
    np.testing.assert_array_equal(np.array(book.dense()[ids]), np.array(book.rows(ids)))


def test_a_float_matrix_is_what_it_says() -> None:
    matrix = Matrix(mx.array([[1.5, 2.0], [3.0, 4.0]], mx.bfloat16))
    assert matrix.dense().dtype == matrix.rows(mx.array([1])).dtype == mx.float32
    assert matrix.rows(mx.array([1])).tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("name", sorted(tiny_tensors()))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = tiny_tensors()
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        load(tmp_path, tensors)


@pytest.mark.parametrize("name", sorted(tiny_tensors()))
def test_a_wrong_shape_is_named_with_both(tmp_path: Path, name: str) -> None:
    tensors = tiny_tensors()
    shape = list(tensors[name].shape)
    tensors[name] = mx.concatenate([tensors[name], tensors[name][:1]])
    with pytest.raises(CheckpointError) as refusal:
        load(tmp_path, tensors)
    message = str(refusal.value)
    assert f"tensor {name} = BF16 {[shape[0] + 1, *shape[1:]]}, but its config.json" in message
    assert f"asks for BF16 or F16 or F32 {shape})" in message


def test_unclaimed_tensors_are_named(tmp_path: Path) -> None:
    extra = {"layers.0.self_attn.q_proj.bias": mx.zeros(64), "layers.2.norm.weight": mx.zeros(64)}
    with pytest.raises(CheckpointError, match="asks for nothing") as it:
        load(tmp_path, tiny_tensors() | extra)
    assert all(f"tensor {name} = F32 [64]" in str(it.value) for name in extra)


def test_both_names_of_a_codebook_are_one_too_many(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors[f"{BOOKS[0]}.weight"] = tensors[BOOKS[0]]
    with pytest.raises(
        CheckpointError, match=rf"\(tensor {BOOKS[0]} = BF16 \[199, 32\], but .* nothing\)"
    ):
        load(tmp_path, tensors)


@pytest.mark.parametrize("name", ["norm.weight", "fc.weight", "layers.0.mlp_conv.base_kernel"])
def test_a_wrong_dtype_is_named(tmp_path: Path, name: str) -> None:
    tensors = tiny_tensors()
    tensors[name] = tensors[name].astype(mx.int32)
    with pytest.raises(
        CheckpointError, match=rf"\(tensor {name} = I32 .*asks for BF16 or F16 or F32"
    ):
        load(tmp_path, tensors)


def test_codes_without_a_quantization_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"U32 codes.*quantization block"):
        load(tmp_path, quantize(tiny_tensors(), bits=8))


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_missing_or_misshapen_parts_of_codes_are_named(tmp_path: Path, part: str) -> None:
    tensors, name = quantize(tiny_tensors(), bits=4), f"fc.{part}"
    short = tensors | {name: tensors[name][:, :1]}
    with pytest.raises(CheckpointError, match=rf"tensor {name} = BF16 \[64, 1\].*\[64, 6\]"):
        load(tmp_path / "short", short, quantization=Q4)
    del tensors[name]
    with pytest.raises(CheckpointError, match=rf"\(no tensor {name}, but .* \[64, 6\]\)"):
        load(tmp_path / "missing", tensors, quantization=Q4)


def test_codes_of_other_bits_or_groups_than_the_config_says_are_refused(tmp_path: Path) -> None:
    tensors = quantize(tiny_tensors(), bits=4)
    with pytest.raises(CheckpointError, match=r"= U32 .*, but its config.json asks for U32"):
        load(tmp_path / "bits", tensors, quantization={"group_size": 32, "bits": 8})
    groups = {"group_size": 64, "bits": 4}
    with pytest.raises(CheckpointError, match=r"fc.scales = BF16 \[64, 6\], but .* \[64, 3\]"):
        load(tmp_path / "groups", tensors, quantization=groups)
    name = "layers.0.mlp.down_proj"
    codes = {f"{name}.{part}": tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases")}
    with pytest.raises(CheckpointError, match=rf"{name}.weight = U32.*groups of 64 .* 96 columns"):
        load(tmp_path / "uneven", tiny_tensors() | codes, quantization=groups)


def test_a_quantization_block_without_codes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"4-bit codes in groups of 32, but .* 0 tensors of"):
        load(tmp_path, tiny_tensors(), quantization=Q4)


@pytest.mark.parametrize("name", ["norm.weight", BOOKS[1], "layers.1.attention_conv.base_kernel"])
def test_floats_are_of_the_type_that_the_config_names(tmp_path: Path, name: str) -> None:
    tensors = tiny_tensors()
    assert len(draft(load(tmp_path / "named", tensors, dtype="bfloat16"))) == 7
    tensors[name] = tensors[name].astype(mx.float32)
    with pytest.raises(CheckpointError, match=rf"\(tensor {name} = F32 .* asks for BF16 \["):
        load(tmp_path / "other", tensors, dtype="bfloat16")


def test_all_that_is_wrong_is_said_at_once_and_no_tensor_is_read(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"extra": mx.zeros(3)}
    del tensors["norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:1]
    folder = save(tmp_path, tiny_config(), tensors)
    config = DFlash2Config.read(folder)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with pytest.raises(CheckpointError) as refusal:
        DFlash2Weights.read(folder, config)
    assert mx.get_peak_memory() <= before
    for name in ("extra", "norm.weight", "fc.weight"):
        assert f"tensor {name}" in str(refusal.value)


@pytest.mark.parametrize("kept", [0, 4, 8, 200, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    folder = save(tmp_path, tiny_config(), tiny_tensors())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=r"is damaged .*download or convert the checkpoint"):
        load_dflash2(folder, shared(tiny_target()))


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 64, b"\x10" + bytes(7) + b'{"fc.weight": 1}', b"\x04" + bytes(7) + b"[[[["],
)
def test_garbled_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path, tiny_config(), tiny_tensors())
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_dflash2(folder, shared(tiny_target()))


def test_a_missing_file_is_refused_and_so_is_a_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_config(), tiny_tensors())
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_dflash2(folder, shared(tiny_target()))
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_dflash2(folder, shared(tiny_target()))
