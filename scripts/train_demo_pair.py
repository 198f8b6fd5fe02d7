"""Train the demo pair again, stage by stage: see README.md in this folder.

    python train_demo_pair.py STAGE --work FOLDER

A stage is skipped when its output is in the work folder, unless --force is given.
"""

import argparse
import dataclasses
import gc
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = (
    "prompts",
    "teacher",
    "sample",
    "corpus",
    "fresh",
    "target",
    "polish",
    "distill",
    "rollouts",
    "drafter",
    "evaluate",
    "export",
)
LARGEST_PAIR = 25_000_000  # bytes: weights and tokenizer
SMOKE = (  # tiny sizes: every stage in seconds
    "target.steps=4",
    "target.rows=4",
    "polish.steps=2",
    "polish.rounds=2",
    "polish.rows=4",
    "polish.rollout_rows_in_batch=2",
    "polish.talks=8",
    "polish.width=128",
    "distill.rounds=2",
    "distill.steps=2",
    "distill.width=128",
    "distill.rows=8",
    "distill.renamed_rows=2",
    "distill.own_rows=2",
    "distill.unlearned_rows=2",
    "distill.judged=4",
    "distill.loop_talks=4",
    "talk.batches=1",
    "talk.rows=16",
    "talk.samples=2",
    "talk.turns=1",
    "talk.width=256",
    "rollouts.batches=1",
    "rollouts.rows=8",
    "drafter.steps=4",
    "drafter.segments=4",
    "drafter.anchors=4",
    "evaluate.prompts=8",
    "evaluate.width=128",
    "evaluate.long_width=256",
    "evaluate.loop_prompts=4",
    "evaluate.loop_passes=3",
    "evaluate.samples=2",
    "evaluate.sets=choose_new,choose_known",
)


class Work:
    """The work folder: where each stage leaves its output."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.corpus = folder / "corpus"
        self.samples = folder / "samples"
        self.fresh = folder / "fresh"
        self.polished = folder / "polished"
        self.pair = folder / "pair"
        self.outputs = {
            "prompts": folder / "prompts.jsonl.gz",
            "teacher": folder / "teacher_index.json",
            "sample": self.samples,
            "corpus": self.corpus / "corpus_report.json",
            "fresh": self.fresh / "choose.json",
            "target": folder / "target_float.safetensors",
            "polish": self.polished / "model.safetensors",
            "distill": self.pair / "target" / "model.safetensors",
            "rollouts": folder / "rollouts.npz",
            "drafter": self.pair / "drafter" / "model.safetensors",
            "evaluate": self.pair / "results.json",
        }

    def has(self, stage: str) -> bool:
        return stage in self.outputs and self.outputs[stage].exists()


def with_overrides(settings: Any, group: str, overrides: list[str]) -> Any:
    """A copy of a settings dataclass with the values of ``group.field=value`` entries."""
    changes = {}
    for entry in overrides:
        name, _, value = entry.partition("=")
        prefix, _, key = name.partition(".")
        if prefix != group:
            continue
        if key not in {f.name for f in dataclasses.fields(settings)}:
            raise SystemExit(f"--set {entry}: {group} has no setting {key!r}")
        changes[key] = type(getattr(settings, key))(value)
    return dataclasses.replace(settings, **changes)


class Stages:
    """One method for each stage; modules are imported where they are needed."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.work = args, Work(args.work)
        self.overrides = [*(SMOKE if args.smoke else ()), *args.set]

    def settings(self, default: Any, group: str) -> Any:
        return with_overrides(default, group, self.overrides)

    def device(self) -> Any:
        import torch

        gc.collect()
        torch.cuda.empty_cache()  # what the stage before left to the allocator
        torch.set_float32_matmul_precision("high")
        if self.args.device:
            return torch.device(self.args.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def read_corpus(self) -> Any:
        from demo_pair_training.data import Corpus

        return Corpus.read(self.work.corpus)

    def target_shape(self) -> Any:
        from demo_pair_training.target_model import TargetShape

        return self.settings(TargetShape(), "target_shape")

    def prompts(self) -> None:
        from demo_pair_training.prompts import write_prompts

        write_prompts(self.work.folder)

    def teacher(self) -> None:
        from demo_pair_training.teacher import unpack_teacher

        unpack_teacher(self.work.folder)

    def sample(self) -> None:
        from demo_pair_training.teacher import SamplePlan, sample_chats

        plan = self.settings(SamplePlan(), "sample")
        sample_chats(self.work.folder, self.work.samples, plan, device=str(self.device()))

    def corpus(self) -> None:
        from demo_pair_training.corpus import build_corpus

        build_corpus(self.work.folder, self.work.samples)

    def fresh(self) -> None:
        from demo_pair_training.fresh import FreshSettings, write_fresh

        settings = self.settings(FreshSettings(), "fresh")
        write_fresh(self.read_corpus(), self.work.folder, self.work.fresh, settings)

    def target(self) -> None:
        from demo_pair_training.train_target import TargetSettings, train_target

        settings = self.settings(TargetSettings(), "target")
        corpus, device = self.read_corpus(), self.device()
        train_target(corpus, self.work.folder, self.target_shape(), settings, device)

    def polish(self) -> None:
        from demo_pair_training.polish import PolishSettings, polish

        settings = self.settings(PolishSettings(), "polish")
        corpus, device = self.read_corpus(), self.device()
        polish(corpus, self.work.folder, self.work.polished, self.target_shape(), settings, device)

    def distill(self) -> None:
        from demo_pair_training.distill import DistillSettings, distill
        from demo_pair_training.self_talk import TalkSettings

        work = self.work
        distill(
            self.read_corpus(),
            work.fresh,
            self.args.start_target or work.polished,
            work.pair / "target",
            work.folder / "distill_report.json",
            self.settings(DistillSettings(), "distill"),
            self.settings(TalkSettings(), "talk"),
            self.device(),
        )

    def rollouts(self) -> None:
        from demo_pair_training.rollouts import RolloutSettings, make_rollouts

        settings = self.settings(RolloutSettings(), "rollouts")
        corpus, work, device = self.read_corpus(), self.work, self.device()
        make_rollouts(corpus, work.fresh, work.folder, work.pair / "target", settings, device)

    def drafter(self) -> None:
        from demo_pair_training.drafter_model import DrafterShape
        from demo_pair_training.train_drafter import DrafterSettings, train_drafter

        settings = self.settings(DrafterSettings(), "drafter")
        shape = self.settings(DrafterShape(), "drafter_shape")
        pair, device = self.work.pair, self.device()
        train_drafter(
            self.work.folder,
            pair / "target",
            pair / "drafter",
            shape,
            settings,
            device,
            self.args.start_drafter,
        )

    def evaluate(self) -> None:
        from demo_pair_training.evaluate import EvaluationSettings, evaluate

        settings = self.settings(EvaluationSettings(), "evaluate")
        pair, device = self.work.pair, self.device()
        drafter = pair / "drafter" if self.work.has("drafter") else None
        evaluate(
            self.read_corpus(),
            pair / "target",
            drafter,
            self.work.outputs["evaluate"],
            settings,
            device,
            self.args.compare,
        )

    def export(self) -> None:
        """Check the size of the pair and copy it where it ships."""
        parts = [self.work.pair / "target", self.work.pair / "drafter"]
        files = [path for part in parts for path in sorted(part.iterdir())]
        size = sum(path.stat().st_size for path in files)
        print(f"pair: {size / 1e6:.2f} MB in {len(files)} files", flush=True)
        if size > LARGEST_PAIR:
            raise SystemExit(f"the pair is larger than {LARGEST_PAIR / 1e6:.0f} MB")
        if self.args.to is None:
            return
        from demo_pair_training.prompts import write_measured_prompts

        for part in parts:
            shutil.copytree(part, self.args.to / part.name, dirs_exist_ok=True)
        write_measured_prompts(self.work.folder, self.args.to / "held_out_prompts.json")

    def run(self, name: str) -> None:
        if self.work.has(name) and not self.args.force:
            print(f"== {name}: already there", flush=True)
            return
        start = time.perf_counter()
        stage: Callable[[], None] = getattr(self, name)
        stage()
        print(f"== {name}: {time.perf_counter() - start:.1f} s", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, required=True, help="folder for all results")
    parser.add_argument("--stages", help="with all: a comma-separated part of the stages")
    parser.add_argument("--force", action="store_true", help="run although the output is there")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the code")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP.FIELD=VALUE")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--start-target", type=Path, help="distill: the folder to train on from")
    parser.add_argument("--start-drafter", type=Path, help="drafter: the folder to train on from")
    parser.add_argument("--compare", type=Path, help="evaluate: another target, for its text loss")
    parser.add_argument("--to", type=Path, help="export: where to copy the pair")
    args = parser.parse_args(arguments)
    names = [args.stage] if args.stage != "all" else (args.stages or ",".join(STAGES)).split(",")
    args.work.mkdir(parents=True, exist_ok=True)
    stages = Stages(args)
    for name in names:
        stages.run(name)


if __name__ == "__main__":
    sys.exit(main())
