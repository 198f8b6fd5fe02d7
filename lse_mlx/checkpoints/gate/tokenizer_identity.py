"""What a tokenizer's files say its tokens are, one hash of it, and where two of them differ.

Which text a token stands for, which tokens are added ones (control tokens and the like), and which
of them begins, ends or fills a text is what a drafter was trained on. How text is split is the
target's business alone and is not looked at.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from lse_mlx.checkpoints.checks import shown
from lse_mlx.checkpoints.json_object import read_json_object
from lse_mlx.errors import CheckpointError

FILES = ("tokenizer.json", "vocab.json")
"""Either holds a vocabulary; the first that is there is read."""
OTHER_FILES = ("tokenizer.model", "vocab.txt")
"""Other forms of a vocabulary, which are not read."""
CONFIG = "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Fields of tokenizer_config.json, in the order of their comparison."""


@dataclass(frozen=True)
class TokenizerIdentity:
    """A tokenizer's tokens.

    tokens: every token and its id, the added ones too
    added: the ids of added tokens, and whether each is special (left out of a reply's text)
    roles: the token in each of ROLES that has one; None where no file names any
    """

    tokens: dict[str, int]
    added: dict[int, bool]
    roles: dict[str, str] | None = None

    @property
    def largest(self) -> int:
        """The largest id that stands for a token."""
        return max(self.tokens.values())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of a canonical form: ASCII JSON without spaces, {"added": [[id, special], ...],
        "roles": [[role, token], ...], "tokens": [[id, token], ...]}, all ascending."""
        tokens = sorted([i, token] for token, i in self.tokens.items())
        added = sorted([i, special] for i, special in self.added.items())
        held = {"added": added, "roles": sorted((self.roles or {}).items()), "tokens": tokens}
        form = json.dumps(held, separators=(",", ":"))
        return hashlib.sha256(form.encode("ascii")).hexdigest()

    def text_token(self, token_id: int) -> str | None:
        """The token of text with this id; None for an added token and for an id without one."""
        if token_id in self.added:
            return None
        return next((token for token, i in self.tokens.items() if i == token_id), None)

    def first_difference(self, other: "TokenizerIdentity") -> tuple[str, str] | None:
        """What each of the two says of the lowest id that they say different things of, or else of
        the first role, where the files of both name roles."""
        mine, theirs = self._by_id(), other._by_id()
        for i in sorted(mine.keys() | theirs.keys()):
            if mine.get(i) != theirs.get(i):
                return self._said(i, mine.get(i)), other._said(i, theirs.get(i))
        if self.roles is None or other.roles is None:
            return None
        for role in ROLES:
            one, another = self.roles.get(role), other.roles.get(role)
            if one != another:
                return f"{role} = {one!r}", f"{role} = {another!r}"
        return None

    def _by_id(self) -> dict[int, tuple[list[str], bool | None]]:
        held: dict[int, tuple[list[str], bool | None]] = {}
        for token, i in sorted(self.tokens.items()):
            held.setdefault(i, ([], self.added.get(i)))[0].append(token)
        return held

    def _said(self, token_id: int, held: tuple[list[str], bool | None] | None) -> str:
        if held is None:
            return f"no token {token_id}"
        kind = {None: "of text", False: "added", True: "special"}[held[1]]
        return f"token {token_id} = {' and '.join(map(repr, held[0]))} ({kind})"


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` has a vocabulary of its own."""
    return any((folder / name).is_file() for name in FILES)


def unread_tokenizer(folder: Path) -> str | None:
    """The name of a vocabulary in `folder` where it has one, but none that can be read."""
    names = [] if has_tokenizer(folder) else OTHER_FILES
    return next((name for name in names if (folder / name).is_file()), None)


def read_tokenizer(folder: Path) -> TokenizerIdentity:
    """The tokenizer in `folder`, from its JSON files alone; nothing is run that they may name.

    tokenizer.json or vocab.json gives the vocabulary; added tokens are those of tokenizer.json, of
    added_tokens.json and of tokenizer_config.json's added_tokens_decoder together; that file's too are
    the roles.
    Raises CheckpointError if there is none, or a file is damaged.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"{folder} has no tokenizer.json: download the tokenizer of this checkpoint."
        )
    held = read_json_object(path)
    listed: dict[str, tuple[int, bool]] = {}
    if path.name == "tokenizer.json":
        vocabulary, listed = _vocabulary(path, held), _listed(path, held.get("added_tokens", []))
    else:
        vocabulary = _checked(path, held)
    # What says which tokens are special counts before what does not.
    about = folder / CONFIG
    stated = read_json_object(about) if about.is_file() else {}
    added = _plain(folder / "added_tokens.json") | _decoder(about, stated)
    added |= listed
    tokens = vocabulary | {token: i for token, (i, _) in added.items()}
    if not tokens:
        _refuse(path, "it has no tokens")
    return TokenizerIdentity(tokens, dict(added.values()), _roles(about, stated) or None)


def _refuse(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path} is no tokenizer ({what}): download the checkpoint again.")


def _vocabulary(path: Path, held: dict[str, Any]) -> dict[str, int]:
    """The vocabulary of a tokenizer.json: an object, or the [piece, score] list of Unigram."""
    model = held.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        if not all(isinstance(i, list) and i and isinstance(i[0], str) for i in vocabulary):
            _refuse(path, "its list of pieces holds something else")
        vocabulary = {item[0]: place for place, item in enumerate(vocabulary)}
    return _checked(path, vocabulary)


def _checked(path: Path, vocabulary: Any) -> dict[str, int]:
    if not isinstance(vocabulary, dict):
        _refuse(path, "it has no vocabulary")
    for token, i in vocabulary.items():
        if not isinstance(token, str) or type(i) is not int or i < 0:
            _refuse(path, f"it gives the token {shown(token)} the id {shown(i)}")
    return vocabulary


def _listed(path: Path, entries: Any) -> dict[str, tuple[int, bool]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        _refuse(path, "its added_tokens are no list of objects")
    return dict(_added(path, entry.get("id"), entry) for entry in entries)


def _plain(path: Path) -> dict[str, tuple[int, bool]]:
    """The tokens of an added_tokens.json, which does not say which of them are special."""
    if not path.is_file():
        return {}
    return {token: (i, False) for token, i in _checked(path, read_json_object(path)).items()}


def _roles(path: Path, stated: dict[str, Any]) -> dict[str, str]:
    """The tokens that a tokenizer_config.json gives a role, each as its text or as an object."""
    roles: dict[str, str] = {}
    for role in ROLES:
        token = stated.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
        elif token is not None or stated.get(role) is not None:
            _refuse(path, f"it gives {role} as {shown(stated[role])}")
    return roles


def _decoder(path: Path, stated: dict[str, Any]) -> dict[str, tuple[int, bool]]:
    """The added tokens that a tokenizer_config.json lists by their ids."""
    entries = stated.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        _refuse(path, "its added_tokens_decoder is no object of objects")
    ids = {i: int(i) if i.isdecimal() and len(i) < 10 else i for i in entries}
    return dict(_added(path, ids[i], entry) for i, entry in entries.items())


def _added(path: Path, i: Any, entry: dict[str, Any]) -> tuple[str, tuple[int, bool]]:
    token, special = entry.get("content"), entry.get("special", False)
    if not isinstance(token, str) or type(i) is not int or i < 0 or not isinstance(special, bool):
        given = f"{shown(token)} the id {shown(i)}, special {shown(special)}"
        _refuse(path, f"it gives the added token {given}")
    return token, (i, special)
