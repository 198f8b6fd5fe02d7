"""`lse-mlx pull`, as a person runs it, against a hub on this machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lse_mlx.cli.main import app
from lse_mlx.cli.pull import choose
from lse_mlx.errors import CheckpointError, LseError, RequestError
from tests.checkpoints.hub.fake_hub import COMMIT, FIRST, FakeHub, checkpoint, serving
from tests.checkpoints.hub.fetcher import Fetcher


def start(
    hub: FakeHub, home: Path, *arguments: str, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LSE_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "lse_mlx", "pull", *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **kept,
            "HF_HOME": str(home),
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        },
    )


def test_a_pull_prints_the_folder_and_the_next_one_asks_only_for_the_branch(
    tmp_path: Path,
) -> None:
    with serving(FakeHub(checkpoint())) as hub:
        pulled = start(hub, tmp_path, "org/tiny")
        out, err = pulled.communicate(timeout=60)
        assert pulled.returncode == 0, err
        folder = tmp_path / "hub/models--org--tiny/snapshots" / COMMIT
        assert out == f"{folder}\n"
        assert (folder / FIRST).read_bytes() == hub.files[FIRST]
        assert "Downloading org/tiny: 5 files" in err
        assert "percent=100" in err
        hub.requests.clear()
        again = start(hub, tmp_path, "org/tiny")
        assert again.communicate(timeout=60)[0] == out
        assert [path for _, path, _ in hub.requests] == ["/api/models/org/tiny"]


def test_ctrl_c_ends_a_pull_at_once_and_leaves_it_to_be_continued(
    tmp_path: Path,
) -> None:
    with serving(FakeHub(checkpoint(), stall_at={FIRST: 500})) as hub:
        pulled = start(hub, tmp_path, "org/tiny")
        assert hub.stalled.wait(60)
        pulled.send_signal(signal.SIGINT)
        _, err = pulled.communicate(timeout=30)  # the hub holds the connection for longer
        assert pulled.returncode == 130
        assert "Traceback" not in err
        assert "interrupted" in err


def test_the_main_pair_is_asked_for_and_brought_whole(tmp_path: Path) -> None:
    both = {one.repository: one.revision or "" for one in choose(None, drafter_only=False)}
    with serving(FakeHub(checkpoint(), commits=both)) as hub:
        ours, theirs = os.openpty()
        os.write(ours, b"n\n")
        asked = start(hub, tmp_path, stdin=theirs)
        command = Fetcher(tmp_path, HF_ENDPOINT=hub.endpoint)

        unasked = command.run("pull")
        assert unasked["status"] == 2
        assert " to download to " in unasked["err"] and " free." in unasked["err"]
        assert "error: Nobody can be asked here: give --yes" in unasked["err"]
        err = asked.communicate(timeout=60)[1]
        for end in (ours, theirs):
            os.close(end)
        assert asked.returncode == 0
        assert "Download? [Y/n]" in err and "Nothing was downloaded." in err
        assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
        offline = command.run("pull", "--offline")
        assert "nothing is to be downloaded: run `lse-mlx pull qwen3.8-27b`" in offline["err"]

        out = command.run("pull", "--yes")["out"]
        for folder, (repository, revision) in zip(out.splitlines(), both.items(), strict=True):
            name = f"models--{repository.replace('/', '--')}"
            assert Path(folder) == tmp_path / "hub" / name / "snapshots" / revision
            assert (Path(folder) / FIRST).read_bytes() == hub.files[FIRST]

        hub.requests.clear()
        for again in (("qwen3.8-27b", "--offline"), (), ("QWEN3.8-27B",)):
            assert command.run("pull", *again)["out"] == out
        assert command.run("pull", "--drafter-only")["out"] == out.splitlines(True)[1]
        assert command.run("models", "--json")["out"].count('"whole"') == 2
        assert not hub.requests
        command.close()


def test_what_the_command_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    for arguments, status, said in (
        (["x"], 2, "'x' is no pair and no repository"),
        (["./tests"], 2, "'./tests' is a folder here"),
        (["glm-5.3-flash"], 2, "give --drafter-only for its drafter"),
        (["x", "--drafter-only"], 2, "--drafter-only is for a pair"),
        (["org/none"], 2, "HF_HUB_OFFLINE is set: run `lse-mlx pull org/none`"),
        (["org/none", "--offline"], 2, "nothing is to be downloaded: run `lse-mlx pull org/none`"),
    ):
        refused = CliRunner().invoke(app, ["pull", *arguments])
        assert refused.exit_code == status
        assert refused.stderr.startswith("error: ")
        assert said in refused.stderr
        assert refused.stderr.count("\n") == 1
    packaged = CliRunner().invoke(app, ["pull", "demo"])
    assert packaged.exit_code == 0
    assert "in the package" in packaged.stderr


def test_a_name_chooses_what_is_fetched(tmp_path: Path) -> None:
    both = choose(None, drafter_only=False)
    assert [one.repository for one in both] == [
        "mlx-community/Qwen3.8-27B-4bit",
        "incoai/Qwen3.8-27B-DFlash2",
    ]
    assert both == choose("Qwen3.8-27b", drafter_only=False)
    assert [one.room for one in both] == [0, 2_044_950_184]
    assert [one.pull for one in both] == ["lse-mlx pull qwen3.8-27b"] * 2
    assert choose(None, drafter_only=True) == both[1:]
    [glm] = choose("glm-5.3-flash", drafter_only=True)
    assert glm.repository == "incoai/GLM-5.3-Flash-DFlash2"
    # The pair cannot be pulled by its name, as no build of its target is known.
    assert glm.pull == f"lse-mlx pull {glm.repository}@{glm.revision}"
    [one] = choose("org/name@v1", drafter_only=False)
    assert (one.repository, one.revision) == ("org/name", "v1")
    refusals: list[tuple[str | None, bool, type[LseError]]] = [
        ("org/name", True, RequestError),
        ("org/name@a/../../x", False, CheckpointError),
        (str(tmp_path), False, CheckpointError),
        ("glm-5.3-flash", False, CheckpointError),
    ]
    for name, drafter_only, kind in refusals:
        with pytest.raises(kind):
            choose(name, drafter_only)
