"""Stream a reply, then say what the drafter was good for.

python examples/stream.py "Write a story about a shy fox."
"""

import sys

import lse_mlx


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Write a story about a shy fox."
    with lse_mlx.load() as engine:
        result = None
        for piece in engine.stream(prompt, max_tokens=64):
            print(piece, end="", flush=True)
            result = piece.result
        assert result is not None  # the last piece always has it
        alone = engine.generate(prompt, max_tokens=64, speculate=False)
    fast, plain = result.timings, alone.timings
    print(f"\n\n{fast['tokens_per_pass']:.2f} tokens a pass of the target")
    print(
        f"{fast['decode_per_second']:.0f} tokens/s, {plain['decode_per_second']:.0f} without drafter"
    )
    print("the same text" if alone.text == result.text else "ANOTHER text")


if __name__ == "__main__":
    main()
