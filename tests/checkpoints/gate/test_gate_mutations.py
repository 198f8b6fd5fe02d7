"""Every single change of the demo drafter's config.json and of its tensors is refused by its name."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lse_mlx import demo_pair
from lse_mlx.checkpoints.checks import MOST_SPELLED_OUT
from lse_mlx.checkpoints.conversion.convert import convert
from lse_mlx.checkpoints.gate.gate import PairRefused, check_pair, inspect_pair
from lse_mlx.errors import CheckpointError
from tests.checkpoints.gate.sparse_checkpoints import (
    WIDTH,
    Entries,
    hollow,
    hollow_demo,
    read_entries,
    read_json,
    write_json,
    write_sparse,
)

CONFIG: dict[str, Any] = read_json(demo_pair.DRAFTER / "config.json")
TENSORS = read_entries(demo_pair.DRAFTER / "model.safetensors")
ARCHITECTURE = "DFlash2DraftModel"
Path_ = tuple[str, ...]


def objects(values: dict[str, Any], path: Path_ = ()) -> Iterator[Path_]:
    """The way to every object of a config, itself first."""
    yield path
    for key, value in values.items():
        if isinstance(value, dict):
            yield from objects(value, (*path, key))


def leaves(values: dict[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Everything in a config that is no object, a list as a whole."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def other_values(value: Any) -> list[Any]:
    """Values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, value * 2, 0, -value]
    if isinstance(value, float):
        return [value * 2, value / 2, 0.0, -value]
    if isinstance(value, str):
        return [f"{value}x", value.upper(), ""]
    assert isinstance(value, list)
    changed = [[*value[:i], other, *value[i + 1 :]]
               for i, item in enumerate(value) for other in other_values(item)]  # fmt: skip
    return [*changed, value[:-1], [*value, value[-1]], value[1:], []]


def other_types(value: Any) -> list[Any]:
    """The value as another type, and null."""
    other: list[Any] = [str(value), [value], {"value": value}, None]
    if isinstance(value, str):
        other[0] = 1
    if isinstance(value, bool):
        other.append(int(value))
    elif isinstance(value, int):
        other.append(value + 0.5)
    if isinstance(value, list):
        other += [dict(enumerate(map(str, value))), value[0]]
    return other


def changed(path: Path_, value: Any) -> dict[str, Any]:
    """The config with one value set."""
    values = copy.deepcopy(CONFIG)
    inner = values
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return values


def without(path: Path_) -> dict[str, Any]:
    values = copy.deepcopy(CONFIG)
    inner = values
    for part in path[:-1]:
        inner = inner[part]
    del inner[path[-1]]
    return values


LEAVES = dict(leaves(CONFIG))
OBJECTS = list(objects(CONFIG))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo pair without its weights; each test writes one file of the drafter anew."""
    return hollow_demo(tmp_path_factory.mktemp("pair"))


def refused_fields(pair: tuple[Path, Path], values: dict[str, Any]) -> set[str]:
    """The fields that the gate refuses with `values` as config.json; each is in its sentence."""
    write_json(pair[1] / "config.json", values)
    try:
        report = check_pair(*pair)
    except PairRefused as error:
        refusal, report = str(error), error.report
    except CheckpointError as error:
        # A DFlash2 drafter is told by this one field, so without it nothing else is looked at.
        return {"architectures"} if "is no DFlash2 drafter but" in str(error) else set()
    else:
        refusal = ""
    fields = [check.field for check in report.mismatches]
    assert all(field in refusal for field in fields[:MOST_SPELLED_OUT])
    return set(fields)


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_another_value_is_refused(pair: tuple[Path, Path], path: Path_) -> None:
    value = LEAVES[path]
    for other in other_values(value):
        if other != value:
            assert ".".join(path) in refused_fields(pair, changed(path, other)), other


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_another_type_is_refused(pair: tuple[Path, Path], path: Path_) -> None:
    for other in other_types(LEAVES[path]):
        if other == ARCHITECTURE:
            continue  # the name alone says the same as the list of it
        fields = refused_fields(pair, changed(path, other))
        within = {f"{'.'.join(path)}.{key}" for key in other} if isinstance(other, dict) else set()
        assert ({".".join(path)} | within) & fields, other


def test_the_same_number_written_otherwise_is_the_same(pair: tuple[Path, Path]) -> None:
    for path, of in (
        (("rope_parameters", "rope_theta"), int),
        (("max_position_embeddings",), float),
    ):
        value = LEAVES[path]
        assert type(value) is not of
        assert not refused_fields(pair, changed(path, of(value)))


def test_the_one_architecture_without_a_list_is_the_same(pair: tuple[Path, Path]) -> None:
    assert LEAVES[("architectures",)] == [ARCHITECTURE]
    assert not refused_fields(pair, changed(("architectures",), ARCHITECTURE))
    for other in (f"{ARCHITECTURE}s", f"['{ARCHITECTURE}']"):
        assert refused_fields(pair, changed(("architectures",), other)) == {"architectures"}


@pytest.mark.parametrize(
    ("part", "name"), [("rope_parameters", "rope_theta"), ("dflash_config", "block_size")]
)
def test_a_field_at_the_root_of_older_configs_is_the_same(
    pair: tuple[Path, Path], part: str, name: str
) -> None:
    value = LEAVES[(part, name)]
    moved = without((part, name)) | {name: value}
    assert not refused_fields(pair, moved)
    assert not refused_fields(pair, CONFIG | {name: value})
    assert refused_fields(pair, moved | {name: value / 2}) == {f"{part}.{name}"}
    # In both places with another value in each: it may not be there twice.
    assert refused_fields(pair, CONFIG | {name: value / 2}) == {name}


@pytest.mark.parametrize("path", [*LEAVES, *OBJECTS[1:]], ids=".".join)
def test_a_removed_field_is_refused(pair: tuple[Path, Path], path: Path_) -> None:
    fields = refused_fields(pair, without(path))
    name = ".".join(path)
    assert any(field == name or field.startswith(f"{name}.") for field in fields)


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: ".".join(path) or "top")
def test_an_unknown_field_is_refused(pair: tuple[Path, Path], path: Path_) -> None:
    """The demo pair's record holds a whole config.json, so that nothing else may be there."""
    for value in (1, "x", None, False, [], {}, 0.5):
        name = ".".join((*path, "extra"))
        assert refused_fields(pair, changed((*path, "extra"), value)) == {name}
    inner = {"deeper": {"still": 1}}
    assert refused_fields(pair, changed((*path, "extra"), inner)) == {f"{name}.deeper.still"}


# Tensors, of the published form and of a conversion


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The demo pair with its drafter in bf16, in 8 and in 4 bits, without the weights."""
    place = tmp_path_factory.mktemp("forms")
    target, drafter = hollow_demo(place / "bf16")
    found = {"bf16": (target, drafter)}
    for bits in (8, 4):
        convert(demo_pair.DRAFTER, place / f"made{bits}", "drafter", "unknown", bits=bits)
        found[f"q{bits}"] = (target, hollow(place / f"made{bits}", place / f"q{bits}"))
        # It gives the size of the file, which would tell of most changes without their names.
        (place / f"q{bits}" / "source-repository.json").unlink()
    return found


FORMS = ["bf16", "q8"]
"""Those of which every tensor is changed; "q4" has the tensors of "q8"."""


def refused_tensors(pair: tuple[Path, Path], entries: Entries) -> set[str]:
    """What the gate refuses with these tensors; all must be tensors."""
    whole = read_entries(pair[1] / "model.safetensors")
    write_sparse(pair[1] / "model.safetensors", entries)
    try:
        fields = {check.field for check in inspect_pair(*pair).mismatches}
    finally:
        write_sparse(pair[1] / "model.safetensors", whole)
    assert all(field.startswith("tensor ") for field in fields)
    return {field.removeprefix("tensor ") for field in fields}


@pytest.mark.parametrize("form", [*FORMS, "q4"])
def test_the_unchanged_tensors_are_accepted_in_any_order(
    forms: dict[str, tuple[Path, Path]], form: str
) -> None:
    entries = read_entries(forms[form][1] / "model.safetensors")
    matrices = sum(len(shape) == 2 for _, shape in TENSORS.values())
    assert len(entries) == len(TENSORS) + (0 if form == "bf16" else 2 * matrices)
    assert not refused_tensors(forms[form], entries)
    assert not refused_tensors(forms[form], dict(reversed(entries.items())))


@pytest.mark.parametrize("form", FORMS)
def test_each_removed_tensor_is_refused(forms: dict[str, tuple[Path, Path]], form: str) -> None:
    entries = read_entries(forms[form][1] / "model.safetensors")
    for name in entries:
        kept = {other: entry for other, entry in entries.items() if other != name}
        published = name.removesuffix(".weight") if "codebook" in name else name
        assert {name, published} & refused_tensors(forms[form], kept), name


@pytest.mark.parametrize("form", FORMS)
def test_each_changed_shape_is_refused(forms: dict[str, tuple[Path, Path]], form: str) -> None:
    entries = read_entries(forms[form][1] / "model.safetensors")
    for place, (name, (dtype, shape)) in enumerate(entries.items()):
        shapes = (
            [*shape[:-1], shape[-1] + 1],
            [shape[0] * 2, *shape[1:]],
            [*shape, 1],
            shape[::-1] if shape != shape[::-1] else [1, *shape],
        )
        other = shapes[place % len(shapes)]
        assert refused_tensors(forms[form], entries | {name: (dtype, other)}) == {name}, other


@pytest.mark.parametrize("form", FORMS)
def test_each_changed_type_is_refused(forms: dict[str, tuple[Path, Path]], form: str) -> None:
    entries = read_entries(forms[form][1] / "model.safetensors")
    for place, (name, (dtype, shape)) in enumerate(entries.items()):
        # Those that fill as many bytes are the ones that a file's size does not tell apart.
        alike = {"BF16": "F16", "U32": "I32"}[dtype]
        types = [alike, *sorted({"BF16", "F16", "F32", "I32", "U32", "U8", "F64"} - {dtype, alike})]
        for other in {alike, types[place % len(types)]}:
            found = refused_tensors(forms[form], entries | {name: (other, shape)})
            assert name in found, (name, other)


@pytest.mark.parametrize("form", FORMS)
def test_an_added_tensor_is_refused(forms: dict[str, tuple[Path, Path]], form: str) -> None:
    entries = read_entries(forms[form][1] / "model.safetensors")
    for name in (
        "lm_head.weight",
        "embed_tokens.weight",
        "layers.0.self_attn.q_proj.bias",
        f"layers.{CONFIG['num_hidden_layers']}.input_layernorm.weight",
        "norm.scales",
        "",
    ):
        assert refused_tensors(forms[form], entries | {name: ("BF16", [WIDTH])}) == {name}
    twice = "candidate_selector.predecessor_codebook" + ("" if form != "bf16" else ".weight")
    book = TENSORS["candidate_selector.predecessor_codebook"]
    assert refused_tensors(forms[form], entries | {twice: book}) == {
        "candidate_selector.predecessor_codebook"
    }


@pytest.mark.parametrize("form", FORMS)
def test_each_renamed_tensor_is_refused(forms: dict[str, tuple[Path, Path]], form: str) -> None:
    entries = read_entries(forms[form][1] / "model.safetensors")
    for place, name in enumerate(entries):
        names = (f"{name}x", f"model.{name}", name.replace(".", "_") + "_")
        other = names[place % len(names)]
        renamed = {other if n == name else n: entry for n, entry in entries.items()}
        published = name.removesuffix(".weight") if "codebook" in name else name
        found = refused_tensors(forms[form], renamed)
        assert other in found
        assert {name, published} & found, name


@pytest.mark.parametrize("form", ["q8", "q4"])
def test_each_change_of_the_quantization_is_refused(
    forms: dict[str, tuple[Path, Path]], form: str
) -> None:
    target, drafter = forms[form]
    values = read_json(drafter / "config.json")
    bits = values["quantization"]["bits"]
    blocks: list[Any] = [
        {"bits": 12 - bits},
        {"bits": 3},
        {"group_size": 32},
        {"group_size": 128},
        {"group_size": "64"},
        {"mode": "mxfp8"},
        {"bits": None},
    ]
    try:
        for block in [*(values["quantization"] | change for change in blocks), None, {}, [], 8]:
            write_json(drafter / "config.json", values | {"quantization": block})
            found = [check.field for check in inspect_pair(target, drafter).mismatches]
            assert found, block
            tensors = [field for field in found if field.startswith("tensor ")]
            assert tensors or any(field.startswith("quantization") for field in found), block
    finally:
        write_json(drafter / "config.json", values)


def test_a_quantization_that_the_tensors_do_not_have_is_refused(pair: tuple[Path, Path]) -> None:
    block = {"group_size": 64, "bits": 8}
    assert refused_fields(pair, CONFIG | {"quantization": block}) == {"quantization"}
