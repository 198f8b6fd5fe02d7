"""A pair on the hub: what its small files already refuse costs no weights."""

import json
from pathlib import Path

import pytest

from tests.checkpoints.gate.sparse_checkpoints import QWEN
from tests.checkpoints.hub.fake_hub import COMMIT
from tests.checkpoints.hub.fetcher import Client
from tests.checkpoints.test_resolve import DRAFTER, GEOMETRY, revision_of

BUILD = "someone/Qwen3.8-27B-4bit"
"""A target whose name gets it the registered drafter."""


@pytest.fixture
def pair(client: Client) -> Client:
    """The client of a hub that has a target and the drafter registered for it."""
    client.hub.commits = {BUILD: COMMIT, DRAFTER: revision_of("drafter")}
    client.hub.configs = {
        BUILD: json.dumps({"model_type": "qwen3", **GEOMETRY}).encode(),
        DRAFTER: json.dumps(QWEN).encode(),
    }
    return client


@pytest.mark.parametrize(
    ("repository", "config", "said"),
    [
        (BUILD, {"model_type": "qwen3", **GEOMETRY, "hidden_size": 4096}, "hidden_size = 5120"),
        (BUILD, {"model_type": "qwen3", **GEOMETRY, "num_hidden_layers": 61}, "num_target_layers"),
        (BUILD, {"model_type": "mamba", **GEOMETRY}, "a 'mamba' model, which is not supported"),
        (DRAFTER, {**QWEN, "vocab_size": 250000}, "vocab_size = 250000"),
        (DRAFTER, {**QWEN, "architectures": ["Qwen3ForCausalLM"]}, "is no DFlash2 drafter"),
    ],
)
def test_a_drafter_of_another_target_is_refused_before_the_weights(
    pair: Client, repository: str, config: dict[str, object], said: str
) -> None:
    pair.hub.configs[repository] = json.dumps(config).encode()
    assert said in pair.resolve(BUILD, "auto")["error"]
    asked = [path for _, path, _ in pair.hub.requests]
    assert [path for path in asked if path.endswith("config.json")]
    assert not [path for path in asked if path.endswith(".safetensors")]


def test_a_pair_that_fits_is_brought_whole(pair: Client) -> None:
    answer = pair.resolve(BUILD, "auto")
    folders = {BUILD: Path(answer["target"]), DRAFTER: Path(answer["drafter"])}
    for repository, folder in folders.items():
        assert folder.name == pair.hub.commits[repository]
        assert (folder / "config.json").read_bytes() == pair.hub.configs[repository]
        assert len(list(folder.glob("*.safetensors"))) == 2
