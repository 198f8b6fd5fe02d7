"""Three ways to end a reply: at a string, after a few tokens, and because another thread says so.

python examples/stop.py "Write a story about a shy fox."
"""

import sys
import threading

import lse_mlx


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Write a story about a shy fox."
    with lse_mlx.load() as engine:
        show(engine.generate(prompt, max_tokens=64, stop=[".", "!"], repetition_penalty=1.1))
        show(engine.generate(prompt, max_tokens=5))

        enough = threading.Event()
        threading.Timer(0.5, enough.set).start()  # as a server does when its client is gone
        show(engine.generate(prompt, max_tokens=None, cancelled=lambda emitted: enough.is_set()))


def show(result: lse_mlx.Result) -> None:
    reason = repr(result.stop_string) if result.stop_string else result.stop_reason
    print(f"{result.text}\n({len(result.token_ids)} tokens, ended by {reason})\n")


if __name__ == "__main__":
    main()
