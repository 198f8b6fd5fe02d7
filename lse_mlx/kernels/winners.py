"""Results of races on disk: one file for each device, system, MLX and code of the kernels."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx

from lse_mlx.kernels.kernel_text import kernel_folder
from lse_mlx.kernels.race import RaceResult


def this_device() -> dict[str, str]:
    """What a race's result holds for: another value of any of these may have another winner."""
    about = mx.device_info()
    mac = platform.mac_ver()[0]
    return {
        "chip": str(about.get("device_name", "")),
        "architecture": str(about.get("architecture", "")),
        "system": f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}",
        "mlx": version("mlx"),
        "kernels": kernels_hash(kernel_folder(), Path(__file__).parent),
    }


def kernels_hash(*folders: Path) -> str:
    """SHA-256 over the names and texts of all kernels in `folders`, and of what launches them."""
    whole = hashlib.sha256()
    for folder in folders:
        for path in sorted(p for p in folder.iterdir() if p.suffix in (".metal", ".h", ".py")):
            whole.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()


@dataclass(frozen=True)
class WinnersFile:
    """The file of results for `device` (see `this_device`) in `folder`."""

    folder: Path
    device: Mapping[str, str]

    @property
    def path(self) -> Path:
        """Where it lies; its name tells devices apart."""
        key = hashlib.sha256(json.dumps(dict(self.device), sort_keys=True).encode()).hexdigest()
        return self.folder / f"races-{key[:16]}.json"

    def read(self) -> tuple[dict[str, RaceResult], str]:
        """Results by their key, and why a file that is there was not used, or ""."""
        try:
            stored = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            return {}, f"{self.path} cannot be read ({type(error).__name__})"
        if not isinstance(stored, dict) or stored.get("device") != dict(self.device):
            return {}, f"{self.path} is of another device"
        try:
            results = [_result(entry) for entry in stored["races"]]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return {}, f"{self.path} does not hold results of races"
        return {result.key: result for result in results}, ""

    def write(self, results: Sequence[RaceResult]) -> str:
        """Add the results to those there, in one step; why that failed, or "".

        What another process has put there since it was read stays, and what cannot be read goes.
        """
        merged = self.read()[0] | {result.key: result for result in results}
        races = [result.as_dict() for result in merged.values()]
        text = json.dumps({"device": dict(self.device), "races": races}, indent=1, allow_nan=False)
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text + "\n", "utf-8")
            fresh.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            return f"{self.path} cannot be written ({error.strerror or type(error).__name__})"
        return ""


def _result(entry: Mapping[str, Any]) -> RaceResult:
    """A result as it was written; what a race cannot have found is a ValueError or TypeError."""
    times = {form: _number(time) for form, time in entry["microseconds"].items()}
    errors = {
        form: inf if error is None else _number(error) for form, error in entry["errors"].items()
    }
    result = RaceResult(
        operation=entry["operation"],
        shape=entry["shape"],
        winner=entry["winner"],
        microseconds=times,
        errors=errors,
        refused=dict(entry["refused"].items()),
    )
    texts = (result.operation, result.shape, result.winner, *result.refused.values())
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    if result.winner not in times or times.keys() & result.refused.keys() or 0 in times.values():
        raise ValueError
    return result


def _number(value: Any) -> float:
    """A finite number, not negative: ValueError, TypeError or OverflowError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    number = float(value)
    if not 0 <= number < inf:  # written so that NaN is refused
        raise ValueError
    return number
