"""Write pair.json, the record of a trained pair that the gate holds drafters to.

Without arguments it renews the demo pair's, as has to be done whenever that pair is trained again:

    python scripts/write_pair_record.py

With NAME TARGET DRAFTER it writes DRAFTER/pair.json for a pair of your own.
"""

import argparse
import sys
from pathlib import Path

from lse_mlx import demo_pair
from lse_mlx.checkpoints.gate.pair_record import PAIR_FILE, write_pair_record
from lse_mlx.checkpoints.pairing import DEMO_PAIR
from lse_mlx.errors import CheckpointError


def main(arguments: list[str] | None = None) -> int:
    """Write the record and say where; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", help="what the pair is called")
    parser.add_argument("target", nargs="?", type=Path, help="its target's folder")
    parser.add_argument("drafter", nargs="?", type=Path, help="its drafter's folder")
    asked = parser.parse_args(arguments)
    try:
        if asked.name is None:
            path = DEMO_PAIR
            write_pair_record(path, "demo", demo_pair.TARGET, demo_pair.DRAFTER, ("demo",))
        elif asked.drafter is None:
            parser.error("give NAME TARGET DRAFTER, or nothing for the demo pair")
        else:
            path = asked.drafter / PAIR_FILE
            write_pair_record(path, asked.name, asked.target, asked.drafter)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
