"""A conversation of three turns: every request holds all of it, the session saves the work.

python examples/chat.py
"""

import lse_mlx

TURNS = ["Write a story about a shy fox.", "What happened next?", "Tell me more."]


def main() -> None:
    with lse_mlx.load() as engine:
        session = engine.session()
        messages: list[dict[str, str]] = []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            result = engine.generate(messages, max_tokens=None, session=session)
            messages.append({"role": "assistant", "content": result.text})
            known = result.timings["prompt_cached_n"]
            print(f"> {turn}\n{result.text}")
            print(f"({known} of {result.prompt_tokens} prompt tokens were known)\n")


if __name__ == "__main__":
    main()
