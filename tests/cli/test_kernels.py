"""The options about device kernels: refused at once where they cannot be kept, in one sentence."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import lse_mlx
from lse_mlx.cli.main import app
from lse_mlx.errors import KernelError, RequestError
from tests.cli.test_generate import assert_one_sentence
from tests.tiny_models import on_cpu

PROMPT = "Write a story about a shy fox."
COMMANDS = (("generate", PROMPT), ("demo",), ("warmup",))
EVERY_COMMAND = (*COMMANDS, ("selftest",))
WITHOUT_NETWORK = "nobody/such-a-model"
"""A repository that a command would ask the hub for, had it not refused before."""


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(app, arguments, env=environment or None)


@pytest.mark.parametrize("command", COMMANDS)
def test_required_kernels_are_refused_on_a_cpu_before_anything_is_looked_for(command):
    result = run(*command, "--model", WITHOUT_NETWORK, "--require-device-kernels")
    assert_one_sentence(result, "Device kernels are required", "on the CPU here", status=1)
    assert WITHOUT_NETWORK not in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_environment_requires_them_too(command):
    result = run(*command, "--model", WITHOUT_NETWORK, LSE_REQUIRE_DEVICE_KERNELS="1")
    assert_one_sentence(result, "Device kernels are required", status=1)


def test_the_selftest_requires_them_too_and_checks_nothing():
    for result in (
        run("selftest", "--require-device-kernels"),
        run("selftest", LSE_REQUIRE_DEVICE_KERNELS="1"),
    ):
        assert_one_sentence(result, "Device kernels are required", "on the CPU here", status=1)
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_the_environment_must_be_clear(command):
    assert_one_sentence(
        run(*command, LSE_REQUIRE_DEVICE_KERNELS="yes"), "'yes'", "set it to 1 or 0"
    )


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_help_names_the_variable_whole_on_80_columns(command):
    shown = run(command[0], "--help", COLUMNS="80", TERMINAL_WIDTH="80")
    assert "LSE_REQUIRE_DEVICE_KERNELS=1" in shown.stdout
    assert "…" not in shown.stdout
    assert ("Apple GPU" in shown.stdout) == (command[0] == "generate")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kernels", "fast"), ("'fast'", "auto, own, stock")),
        (("--kernels", ""), ("''",)),
        (("--kernels", "stock", "--exact"), ("'stock'", "exact decoding", "leave out one")),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_value_is_one_sentence(command, options, words):
    assert_one_sentence(run(*command, "--model", WITHOUT_NETWORK, *options), *words)


@pytest.mark.parametrize("options", [("--kernels", "own"), ("--exact",), ("--kernels", "stock")])
def test_on_a_cpu_a_choice_of_kernels_changes_no_token(options):
    plain = run("generate", PROMPT, "--max-tokens", "8")
    chosen = run("generate", PROMPT, "--max-tokens", "8", *options)
    assert chosen.exit_code == 0, chosen.stderr
    assert chosen.stdout == plain.stdout


def test_the_refusal_comes_without_a_traceback_and_with_status_1():
    done = subprocess.run(
        [sys.executable, "-m", "lse_mlx", "generate", PROMPT],
        capture_output=True,
        text=True,
        env=os.environ | {"LSE_REQUIRE_DEVICE_KERNELS": "1"},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: Device kernels are required")


def test_in_python_the_same_is_an_error_before_anything_is_looked_for(monkeypatch):
    with pytest.raises(KernelError, match="on the CPU here"):
        lse_mlx.load(WITHOUT_NETWORK, require_device_kernels=True)
    with pytest.raises(RequestError, match="'fast'"):
        lse_mlx.load(WITHOUT_NETWORK, kernels="fast")
    with pytest.raises(RequestError, match="exact is 3"):
        lse_mlx.load(WITHOUT_NETWORK, exact=3)
    monkeypatch.setenv("LSE_REQUIRE_DEVICE_KERNELS", "1")
    with pytest.raises(KernelError, match="on the CPU here"):
        lse_mlx.load(WITHOUT_NETWORK)
