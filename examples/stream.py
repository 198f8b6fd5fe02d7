"""Stream a reply, then say what the drafter was good for.

python examples/stream.py "Write a story about a shy fox."
"""

import sys
from time import perf_counter

import lse_mlx


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Write a story about a shy fox."
    engine = lse_mlx.load()

    began = perf_counter()
    first = None
    for piece in engine.stream(prompt, max_tokens=64):
        first = first or perf_counter() - began
        print(piece, end="", flush=True)
    print(f"\n\n{perf_counter() - began:.2f} s, the first piece after {first or 0:.2f} s")


if __name__ == "__main__":
    main()
