#!/usr/bin/env python3
"""Convert a bfloat16 DFlash2 drafter to 8-bit codes, by the reference engine's rule to the byte.

    python scripts/convert_dflash2_q8.py SOURCE DESTINATION \
        --source-repository org/name --source-revision 0123abcd

Runs from a checkout with Python 3.11 or newer and NumPy; nothing has to be installed. SOURCE is the
folder with config.json and model.safetensors, DESTINATION a new folder. Prints one line for each
quantized matrix, then source-repository.json. Exit status: 1 if it cannot be done, with one sentence
on standard error, and 2 for a mistake on the command line.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    if sys.stdout is None:
        return _fail("Standard output is closed: give the script somewhere to write.")
    sys.path.insert(0, str(ROOT))
    try:
        from lse_mlx.checkpoints.conversion.convert import convert
        from lse_mlx.checkpoints.conversion.plan import plan_conversion
        from lse_mlx.errors import CheckpointError
    except ImportError as error:
        return _fail(f"{error.name or 'numpy'} cannot be imported: install NumPy 2.4 or newer.")

    try:
        plan = plan_conversion(options.source)
        manifest = convert(
            options.source,
            options.destination,
            options.source_repository,
            options.source_revision,
            progress=_Matrices({t.name: t.source.shape for t in plan.tensors}),
        )
    except CheckpointError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("Interrupted; nothing was left behind.", file=sys.stderr)
        return 130
    except _OutputLost as error:
        return _fail(f"{error}: see that it can be written and convert again.")
    try:
        _say(manifest.text(), end="")
    except _OutputLost as error:
        return _fail(f"{error}, but {options.destination} is complete.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Convert a bfloat16 DFlash2 drafter to affine 8-bit codes in groups of 64."
    )
    parser.add_argument("source", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("destination", type=Path, help="new folder for the conversion")
    parser.add_argument("--source-repository", required=True, help="for the manifest: org/name")
    parser.add_argument("--source-revision", required=True, help="for the manifest: the commit")
    return parser


class _OutputLost(Exception):
    """Standard output took no more; no OSError, for those are about the files of the conversion."""


def _say(text: str, end: str = "\n") -> None:
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        # Without this Python would try, and complain, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _OutputLost(f"Standard output failed ({error.strerror})") from error


class _Matrices:
    """Progress as one line for each quantized matrix, when its first rows are done."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self._shapes = shapes
        self._said = ""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def advance(self, phase: str, done: int, total: int, tensor: str = "") -> None:
        if tensor not in ("", self._said):
            self._said = tensor
            rows, columns = self._shapes[tensor]
            _say(f"{tensor}: {rows} x {columns}")


def _fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
