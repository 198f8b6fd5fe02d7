"""The small trained pair that ships with the package; its card is README.md in this folder."""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFTER = Path(__file__).parent / "drafter"
HELD_OUT_PROMPTS = Path(__file__).parent / "held_out_prompts.json"
