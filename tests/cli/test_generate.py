"""`lse-mlx generate`: what it prints, and one sentence for whatever cannot be done."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lse_mlx import demo_pair
from lse_mlx.cli.main import app

PROMPT = "Write a story about a shy fox."


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


def reply(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_text_goes_to_stdout_and_everything_else_to_stderr():
    result = run(PROMPT, "--max-tokens", "12")
    assert result.exit_code == 0
    assert result.stdout.strip() == reply(PROMPT, "--max-tokens", "12")["text"].strip()
    assert "demo pair" in result.stderr.splitlines()[0]
    assert "tokens/s" in result.stderr


def test_naming_the_demo_says_nothing_about_it():
    assert "demo pair" not in run(PROMPT, "--model", "demo", "--max-tokens", "2").stderr


def test_json_is_one_object_with_ids_reason_seed_and_timings():
    found = reply(PROMPT, "--max-tokens", "12")
    assert len(found["token_ids"]) == 12
    assert (found["finish_reason"], found["stop_reason"]) == ("length", "max_tokens")
    timings = found["timings"]
    assert timings["spec_method"] == "dflash2"
    assert timings["generated_n"] == 12
    assert timings["decode_n"] == 11
    assert timings["spec_accepted"] + timings["spec_steps"] + timings["spec_plain_steps"] >= 11


def test_no_drafter_gives_the_same_tokens_without_speculation():
    alone = reply(PROMPT, "--max-tokens", "24", "--no-drafter")
    assert alone["token_ids"] == reply(PROMPT, "--max-tokens", "24")["token_ids"]
    assert alone["timings"]["spec_method"] == "none"


def test_a_seed_fixes_a_sampled_reply_and_another_seed_changes_it():
    sampled = (PROMPT, "--max-tokens", "32", "--temperature", "1", "--seed")
    first, again, other = reply(*sampled, "7"), reply(*sampled, "7"), reply(*sampled, "8")
    assert first["token_ids"] == again["token_ids"]
    assert first["token_ids"] != other["token_ids"]


def test_the_seed_that_was_taken_is_named_and_gives_the_reply_again():
    sampled = (PROMPT, "--max-tokens", "24", "--temperature", "1", "--top-p", "0.9")
    first = reply(*sampled)
    assert reply(*sampled, "--seed", str(first["seed"]))["token_ids"] == first["token_ids"]


def test_top_k_of_one_is_greedy_at_any_temperature():
    greedy = reply(PROMPT, "--max-tokens", "16")["token_ids"]
    found = reply(PROMPT, "--max-tokens", "16", "--temperature", "1.5", "--top-k", "1")
    assert found["token_ids"] == greedy


def test_min_p_of_one_is_greedy_at_any_temperature():
    greedy = reply(PROMPT, "--max-tokens", "16")["token_ids"]
    found = reply(PROMPT, "--max-tokens", "16", "--temperature", "1.5", "--min-p", "1")
    assert found["token_ids"] == greedy


def test_stop_strings_end_the_text_and_are_named():
    whole = reply(PROMPT, "--max-tokens", "24")["text"]
    stops = ("--stop", "no such text", "--stop", whole[30:36])
    found = reply(PROMPT, "--max-tokens", "24", *stops)
    assert found["text"] == whole[: whole.index(whole[30:36])]
    assert found["stop_string"] == whole[30:36]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", "stop_string")
    shown = run(PROMPT, "--max-tokens", "24", *stops)
    assert shown.stdout == found["text"] + "\n"
    assert f"ended by stop_string {whole[30:36]!r}" in shown.stderr


def test_stop_tokens_end_the_reply_where_they_may():
    ids = reply(PROMPT, "--max-tokens", "16")["token_ids"]
    stops = ("--stop-token-id", str(ids[9]), "--stop-token-id", str(ids[4]))
    found = reply(PROMPT, "--max-tokens", "16", *stops)
    assert found["token_ids"] == ids[: min(ids.index(ids[4]), ids.index(ids[9]))]
    late = reply(PROMPT, "--max-tokens", "16", *stops, "--min-tokens", "12")
    assert len(late["token_ids"]) >= 12
    never = reply(PROMPT, "--max-tokens", "16", *stops, "--end-tokens", "banned")
    assert not {ids[4], ids[9]} & set(never["token_ids"])
    assert never["stop_reason"] == "max_tokens"
    required = reply(PROMPT, "--max-tokens", "4", *stops, "--end-tokens", "required")
    assert required["stop_reason"] == "stop_token"


@pytest.mark.parametrize(
    "options",
    [
        ("--repetition-penalty", "1.8"),
        ("--presence-penalty", "5"),
        ("--frequency-penalty", "5"),
        ("--logit-bias", "405=-100", "--logit-bias", "379=-1e30"),
    ],
)
def test_penalties_change_the_reply(options: tuple[str, ...]):
    greedy = reply(PROMPT, "--max-tokens", "16")["token_ids"]
    found = reply(PROMPT, "--max-tokens", "16", *options)["token_ids"]
    assert found != greedy
    if options[0] != "--logit-bias":  # a window of one token changes less
        window = options[0].replace("penalty", "window")
        assert reply(PROMPT, "--max-tokens", "16", *options, window, "1")["token_ids"] != found


def test_log_probabilities_are_in_the_json_object():
    found = reply(PROMPT, "--max-tokens", "6", "--top-logprobs", "2")
    assert [entry["token"] for entry in found["logprobs"]] == found["token_ids"]
    for entry in found["logprobs"]:
        assert entry["top"][0] == [entry["token"], entry["logprob"]]
        assert len(entry["top"]) == 2
    assert reply(PROMPT, "--max-tokens", "2")["logprobs"] is None


def test_a_failure_of_the_drafter_is_one_line_and_changes_no_text(broken_drafter: Path):
    options = (PROMPT, "--max-tokens", "12")
    shown = run(*options, "--drafter", str(broken_drafter))
    assert shown.exit_code == 0
    assert shown.stdout.strip() == reply(*options)["text"].strip()
    [line] = [line for line in shown.stderr.splitlines() if "The drafter failed" in line]
    assert line.endswith("so the target went on alone.")
    found = reply(*options, "--drafter", str(broken_drafter))
    assert found["timings"]["spec_failures"] == 1
    strict = run(*options, "--drafter", str(broken_drafter), "--strict-draft")
    assert strict.exit_code == 1
    assert strict.stderr.strip().splitlines()[-1].startswith("error: Draft position 0")


def test_raw_leaves_out_the_chat_template():
    text = "One day, a little fox"
    raw, chat = reply(text, "--raw", "--max-tokens", "4"), reply(text, "--max-tokens", "4")
    assert raw["prompt_tokens"] < chat["prompt_tokens"]


def test_a_dash_reads_the_prompt_from_standard_input():
    for typed in (PROMPT, f"{PROMPT}\n"):
        piped = json.loads(run("-", "--max-tokens", "4", "--json", stdin=typed).stdout)
        assert piped["prompt_tokens"] == reply(PROMPT, "--max-tokens", "4")["prompt_tokens"]
        assert piped["token_ids"] == reply(PROMPT, "--max-tokens", "4")["token_ids"]


def test_input_that_is_no_text_is_refused():
    result = CliRunner().invoke(app, ["generate", "-"], input=b"caf\xe9")
    assert_one_sentence(result, "byte 3", "UTF-8")


def test_a_greedy_reply_has_no_seed():
    assert reply(PROMPT, "--max-tokens", "2")["seed"] is None


def test_one_token_has_no_rate():
    assert "reply 1 token;" in run(PROMPT, "--max-tokens", "1").stderr


def test_help_groups_the_options():
    shown = run("--help").stdout
    for heading in ("Models", "How tokens are chosen", "Penalties", "Where the reply ends"):
        assert f"─ {heading}" in shown
    assert (
        shown.index("--temperature") < shown.index("--repetition-penalty") < shown.index("--stop")
    )


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "lse_mlx", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("lse-mlx ")


def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lse_mlx", "generate", PROMPT, "--max-tokens", "2"],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr


@pytest.fixture
def misfit(tmp_path: Path) -> Path:
    """A drafter made for a target of another width."""
    shutil.copytree(demo_pair.DRAFTER, tmp_path / "misfit")
    path = tmp_path / "misfit" / "config.json"
    config = json.loads(path.read_text())
    config["hidden_size"] *= 2
    path.write_text(json.dumps(config))
    return path.parent


def assert_one_sentence(result, *words: str, status: int = 2) -> None:
    assert result.exit_code == status
    assert result.stdout == ""
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert message.endswith(".")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((PROMPT, "--model", "no-such-model"), ("no-such-model", "does not exist")),
        ((PROMPT, "--model", "./missing/folder"), ("missing/folder", "does not exist")),
        ((PROMPT, "--model", ""), ("The model is ''",)),
        ((PROMPT, "--drafter", ""), ("The drafter is ''",)),
        ((PROMPT, "--model", str(demo_pair.DRAFTER)), ("is a DFlash2 drafter",)),
        ((PROMPT, "--model", __file__), ("test_generate.py", "is a file")),
        ((PROMPT, "--model", str(Path(__file__).parent)), ("config.json",)),
        ((PROMPT, "--drafter", "no-such-drafter"), ("no-such-drafter", "drafter")),
        ((PROMPT, "--drafter", str(demo_pair.TARGET)), ("drafter",)),
        ((PROMPT, "--model", str(demo_pair.DRAFTER)), ("drafter",)),
    ],
)
def test_a_name_that_is_no_checkpoint_gets_one_sentence(
    arguments: tuple[str, ...], words: tuple[str, ...]
):
    assert_one_sentence(run(*arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), ("prompt is empty",)),
        (("  \n",), ("prompt is empty",)),
        (("fox " * 5000,), ("context", "shorten")),
        ((PROMPT, "--temperature", "-1"), ("--temperature is ", "-1")),
        ((PROMPT, "--temperature", "nan"), ("--temperature is ", "nan")),
        ((PROMPT, "--top-k", "-1"), ("--top-k is ", "-1")),
        ((PROMPT, "--top-p", "0"), ("--top-p is ", "0")),
        ((PROMPT, "--top-p", "1.5"), ("--top-p is ", "1.5")),
        ((PROMPT, "--min-p", "2"), ("--min-p is ", "2")),
        ((PROMPT, "--seed", "-3"), ("--seed is ", "-3")),
        ((PROMPT, "--max-tokens", "0"), ("--max-tokens is 0: give a count of at least 1.",)),
        ((PROMPT, "--drafter", "demo", "--no-drafter"), ("--no-drafter",)),
        ((PROMPT, "--stop", ""), ("--stop", "empty")),
        ((PROMPT, "--stop", "caf\udce9"), ("--stop", "UTF-8")),
        ((PROMPT, "--stop-token-id", "-1"), ("--stop-token-id", "-1")),
        ((PROMPT, "--stop-token-id", "5000"), ("--stop-token-id", "5000", "vocabulary of 4096")),
        ((PROMPT, "--min-tokens", "-1"), ("--min-tokens is ", "-1")),
        ((PROMPT, "--min-tokens", "300"), ("--min-tokens is ", "300", "256")),
        ((PROMPT, "--end-tokens", "never"), ("--end-tokens is ", "never")),
        ((PROMPT, "--end-tokens", "required", "--min-tokens", "256"), ("--min-tokens is ", "256")),
        ((PROMPT, "--repetition-penalty", "0"), ("--repetition-penalty is ", "0.0")),
        ((PROMPT, "--repetition-window", "0"), ("--repetition-window is ", "0")),
        ((PROMPT, "--presence-penalty", "nan"), ("--presence-penalty is ", "nan")),
        ((PROMPT, "--presence-window", "-1"), ("--presence-window is ", "-1")),
        ((PROMPT, "--frequency-penalty", "inf"), ("--frequency-penalty is ", "inf")),
        ((PROMPT, "--frequency-window", "0"), ("--frequency-window is ", "0")),
        ((PROMPT, "--logit-bias", "5"), ("--logit-bias is '5'", "equals sign")),
        ((PROMPT, "--logit-bias", "five=1"), ("five=1",)),
        ((PROMPT, "--logit-bias", "5=much"), ("5=much",)),
        ((PROMPT, "--logit-bias", "5=nan"), ("--logit-bias of token 5", "nan")),
        ((PROMPT, "--logit-bias", "-5=1"), ("--logit-bias", "-5")),
        ((PROMPT, "--logit-bias", "5=1", "--logit-bias", "5=2"), ("token 5 twice",)),
        ((PROMPT, "--logit-bias", "5000=1"), ("5000", "vocabulary of 4096")),
        ((PROMPT, "--top-logprobs", "21", "--json"), ("--top-logprobs is ", "21")),
        ((PROMPT, "--top-logprobs", "2"), ("--json",)),
    ],
)
def test_bad_input_gets_one_sentence(arguments: tuple[str, ...], words: tuple[str, ...]):
    assert_one_sentence(run(*arguments), *words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("",),
        (PROMPT, "--stop", ""),
        (PROMPT, "--stop-token-id", "5000"),
        (PROMPT, "--min-tokens", "300"),
        (PROMPT, "--logit-bias", "5000=1"),
        (PROMPT, "--top-logprobs", "21", "--json"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    def load_pair(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("lse_mlx.cli.generate.load_pair", load_pair)
    assert_one_sentence(run(*arguments))
    assert isinstance(run(PROMPT).exception, AssertionError)


def test_a_drafter_of_another_width_is_refused(misfit: Path):
    assert_one_sentence(run(PROMPT, "--drafter", str(misfit)), "hidden_size", "640", "320")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_target_that_lacks_a_file_is_refused(tmp_path: Path, name: str):
    shutil.copytree(demo_pair.TARGET, tmp_path / "target")
    (tmp_path / "target" / name).unlink()
    result = run(PROMPT, "--model", str(tmp_path / "target"))
    assert_one_sentence(result, name.split(".", maxsplit=1)[0])


def test_the_installed_command_answers_and_fails_cleanly(tmp_path: Path):
    command = [sys.executable, "-c", "from lse_mlx.cli.main import app; app()", "generate"]
    good = subprocess.run(
        [*command, PROMPT, "--max-tokens", "4"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert good.returncode == 0
    assert good.stdout.strip()
    bad = subprocess.run([*command, ""], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert bad.returncode == 2
    assert bad.stderr.strip().splitlines()[-1].startswith("error: ")


ANNOUNCING = """
import sys, lse_mlx.cli

class Announce:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx":
            print(flush=True)

sys.meta_path.insert(0, Announce())
lse_mlx.cli.run()
"""
"""The command, printing a line when it begins to import MLX."""


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_is_quiet(begun: bool):
    """While MLX is imported, and while a reply is being decoded."""
    command = [sys.executable, "-c", ANNOUNCING, "generate", PROMPT, "--no-drafter"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(4 if begun else 1)  # the line printed above, and then the reply's beginning
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in said
