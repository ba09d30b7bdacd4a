"""The environment fingerprint: what decides how a training computes, in a form that nodes can compare (rule A2).

Takes everything as arguments: reads no environment, no clock, no package. What differs from node to node by its nature
(the node's name, its job and process ids) is marked where it stands, as `{node:n07}`, so that two texts agree when they
are equal or differ in such marks only. What looks like a secret leaves this module as a digest.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .topology import variable

MAX_TEXT = 4096
"""Characters of one entry; of a longer text the beginning and a digest are compared."""
SHOWN = 240
"""Characters of a differing text that are shown to a person."""
_BEFORE_DIFFERENCE = 60
UNSET = "(unset)"
COMMAND, PYTHON, TORCH = "command", "python", "torch"
NOT_COMPARED = "{not compared}"
"""Stands where a node was told to leave an entry out: it agrees with whatever the others have."""
_COMPARED = re.compile(r"(?:NCCL|TORCH|CUDA)_.*|OMP_NUM_THREADS", re.DOTALL)
_OF_ONE_NODE = re.compile(
    r"(?:SLURM|SLURMD|CROSS_SLURM)_.*|(?:.*_)?(?:RANK|RANKS|HOST|HOSTS|HOSTID|HOSTNAME|NODENAME|LOCALID|PROCID|NODEID)(?:_.*)?"
    r"|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES",
    re.DOTALL,
)
_SECRET_WORD = re.compile(
    r"(?:.*(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL).*|.*(?:TOKENS?|KEYS?))", re.IGNORECASE
)
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_DIGEST_ROUNDS = 20_000


@dataclass(frozen=True)
class Machine:
    """What the fingerprint needs to know of this host and process; versions None where the command has its own."""

    names: Sequence[str]
    process_ids: Sequence[int]
    python_version: str | None = None
    torch_version: str | None = None


@dataclass(frozen=True)
class Wishes:
    """What the options say: more variables to compare, entries to leave out, or no fingerprint at all."""

    same_env: Sequence[str] = field(default_factory=tuple)
    ignore_env: Sequence[str] = field(default_factory=tuple)
    is_off: bool = False


def same_env_problem(names: Iterable[str]) -> str | None:
    """Why a variable cannot be compared, in one line; None if all can."""
    for name in names:
        if not name or not name.isprintable() or "=" in name:
            return f"--same-env {name!a} is no name of a variable"
        if _OF_ONE_NODE.fullmatch(name):
            return f"--same-env {name}: it differs from node to node by its nature, so it is never compared"
    return None


def fingerprint(command: Sequence[str], env: Mapping[str, str], machine: Machine, wishes: Wishes) -> dict[str, str]:
    """The entries to compare, by name: `command`, `python`, `torch`, and variables. Empty when turned off."""
    if wishes.is_off:
        return {}
    marks = _Marks(env, machine)
    found = {
        name: _bounded(marks.in_value(_without_secrets(name, value)))
        for name, value in env.items()
        if value and (_is_compared(name) or name in wishes.same_env)
    }
    found[COMMAND] = _bounded(" ".join(marks.in_word(word) for word in _public_words(command)))
    if machine.python_version is not None:
        found[PYTHON] = machine.python_version
    if machine.torch_version is not None:
        found[TORCH] = machine.torch_version
    return found | dict.fromkeys(wishes.ignore_env, NOT_COMPARED)


def _is_compared(name: str) -> bool:
    return _COMPARED.fullmatch(name) is not None and _OF_ONE_NODE.fullmatch(name) is None


# ---- secrets ------------------------------------------------------------------------------------------------


def is_secret_name(name: str) -> bool:
    """Whether what a variable or option of this name holds must not be told to anybody."""
    return any(_SECRET_WORD.fullmatch(word) for word in re.split(r"[^A-Za-z0-9]+", name))


def _digest(name: str, value: str) -> str:
    """Slow on purpose: a short password must not be found by trying what is journaled and shown."""
    made = hashlib.pbkdf2_hmac("sha256", value.encode("utf-8", "surrogateescape"), name.encode(), _DIGEST_ROUNDS)
    return f"(secret, digest {made.hex()[:12]})"


def _without_secrets(name: str, value: str) -> str:
    if is_secret_name(name):
        return _digest("", value)
    return _USER_INFO.sub(lambda found: _digest("", found[0]), value)


def _public_words(command: Sequence[str]) -> list[str]:
    """The words of a command, with a digest for what follows `--some-token` or `SOME_KEY=`."""
    words: list[str] = []
    is_value = False
    for word in command:
        name, has_value, value = word.partition("=")
        if is_value and not word.startswith("-"):
            words.append(_digest("", word))
            is_value = False
            continue
        is_option = name.startswith("-")
        is_value = is_option and not has_value and is_secret_name(name)
        secret = bool(has_value) and " " not in name and is_secret_name(name)
        shown = f"{name}={_digest('', value)}" if secret else _USER_INFO.sub(lambda one: _digest("", one[0]), word)
        words.append(shlex.quote(shown) if not secret else shown)
    return words


# ---- marks --------------------------------------------------------------------------------------------------

_KIND = "(?:job|array|task|procid|node|pid|long-[0-9a-f]{16})"
_MARK = re.compile(rf"\{{(?P<kinds>{_KIND}(?:\+{_KIND})*):(?P<raw>[^{{}}]*)\}}")
_JOB = {"SLURM_JOB_ID": "job", "SLURM_JOBID": "job", "SLURM_ARRAY_JOB_ID": "array", "SLURM_TASK_PID": "pid"}
_SMALL = {"SLURM_ARRAY_TASK_ID": "task", "SLURM_PROCID": "procid", "SLURM_NODEID": "procid"}
"""Small numbers, which stand for many other things too: marked only inside a longer name."""
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


class _Marks:
    """This node's own ids and names, and how they are marked in a text."""

    def __init__(self, env: Mapping[str, str], machine: Machine) -> None:
        self._kinds: dict[str, list[str]] = {}
        for name, kind in _JOB.items():
            self._add(variable(env, name), kind)
        for one in machine.process_ids:
            self._add(str(one), "pid")
        named = [variable(env, "SLURMD_NODENAME"), *machine.names]
        for text in (*named, *(one.partition(".")[0] for one in named)):
            if not text.isdigit():
                self._add(text, "node")
        self._small: dict[str, list[str]] = {text: list(kinds) for text, kinds in self._kinds.items()}
        for name, kind in _SMALL.items():
            text = variable(env, name)
            if text:
                kinds = self._small.setdefault(text, [])
                kinds += [kind] if kind not in kinds else []
        self._task = variable(env, "SLURM_ARRAY_TASK_ID")
        self._large_pattern, self._pattern = _any_of(self._kinds), _any_of(self._small)

    def _add(self, text: str, kind: str) -> None:
        if text and not set(text) & set("{}"):
            kinds = self._kinds.setdefault(text, [])
            if kind not in kinds:
                kinds.append(kind)

    def in_value(self, text: str) -> str:
        """A variable's value with its marks."""
        return self._marked(text)

    def in_word(self, word: str) -> str:
        """A word of the command with its marks; a word or option value that is the array task's id is one."""
        name, has_value, value = word.partition("=")
        if has_value and name.startswith("-"):
            return f"{self._marked(name)}={self.in_word(value)}"
        if self._task and word == self._task:
            return f"{{task:{word}}}" if word not in self._kinds else self._mark(self._small, word)
        return self._marked(word)

    def _marked(self, text: str) -> str:
        is_plain = all(_NUMBER.fullmatch(one) for one in re.split(r"[,;:x ]", text) if one)
        pattern, kinds = (self._large_pattern, self._kinds) if is_plain else (self._pattern, self._small)
        return pattern.sub(lambda found: self._mark(kinds, found[0]), text) if pattern is not None else text

    @staticmethod
    def _mark(kinds: Mapping[str, Sequence[str]], text: str) -> str:
        return f"{{{'+'.join(kinds[text])}:{text}}}"


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of the texts, the longest first: a number among no other digits, a name among no other letters."""
    parts = [
        rf"(?<![0-9]){one}(?![0-9])" if one.isdigit() else rf"(?<![A-Za-z0-9]){re.escape(one)}(?![A-Za-z0-9])"
        for one in sorted(texts, key=lambda one: (-len(one), one))
    ]
    return re.compile("|".join(parts)) if parts else None


def agree(one: str | None, other: str | None) -> bool:
    """Whether two entries are equal but for marks of the same kind, or one is not to be compared; None: unset."""
    return _difference("", one, other) is None


@dataclass(frozen=True)
class _Parting:
    """How many characters of two texts, as they were written, agree."""

    in_one: int
    in_other: int


def _parting(one: str, other: str) -> _Parting | None:
    """Where two entries cease to agree; None if they do not."""
    if _MARK.sub(r"{\g<kinds>}", one) == _MARK.sub(r"{\g<kinds>}", other):
        return None  # at once, as it is for nearly all nodes: thousands join together
    left, right = _pieces(one), _pieces(other)
    in_one = in_other = 0
    while left and right:
        a, b = left.pop(), right.pop()
        if a.kinds & b.kinds:
            in_one, in_other = in_one + len(a.text), in_other + len(b.text)
            continue
        # Otherwise what was written decides, as far as the shorter goes.
        length = min(len(a.text), len(b.text))
        is_same = a.text[:length] == b.text[:length]
        same = length if is_same else next(at for at in range(length) if a.text[at] != b.text[at])
        in_one, in_other = in_one + same, in_other + same
        if same < length:
            return _Parting(in_one, in_other)
        left += a.after(length)
        right += b.after(length)
    return _Parting(in_one, in_other) if any(one.text for one in (*left, *right)) else None


@dataclass(frozen=True)
class _Piece:
    """A mark with what stands in it, or, without kinds, the text between two marks."""

    text: str
    kinds: frozenset[str] = frozenset()

    def after(self, length: int) -> list[_Piece]:
        """What is left of it once so many characters are compared."""
        if length == 0:
            return [self] if self.text else []
        return [_Piece(self.text[length:])] if length < len(self.text) else []


def _pieces(text: str) -> list[_Piece]:
    """A text taken apart, last piece first."""
    pieces: list[_Piece] = []
    at = 0
    for found in _MARK.finditer(text):
        pieces += _Piece(text[at : found.start()]).after(0)
        pieces.append(_Piece(found["raw"], frozenset(found["kinds"].split("+"))))
        at = found.end()
    return [*pieces, *_Piece(text[at:]).after(0)][::-1]


@dataclass(frozen=True)
class Differing:
    """An entry in which two fingerprints differ, as it is shown: long texts from a little before where they part."""

    name: str
    one: str
    other: str


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[Differing]:
    """The entries in which two fingerprints do not agree. One that is turned off, or of an older agent, is empty and
    agrees with all."""
    if not one or not other:
        return []
    found = (_difference(name, one.get(name), other.get(name)) for name in sorted({*one, *other}))
    return [difference for difference in found if difference is not None]


def _difference(name: str, one: str | None, other: str | None) -> Differing | None:
    if NOT_COMPARED in (one, other) or one == other:
        return None
    if one is None or other is None:
        return Differing(name, *(UNSET if text is None else _plain(text)[:SHOWN] for text in (one, other)))
    at = _parting(one, other)
    if at is None:
        return None
    return Differing(name, _cut(_plain(one), at.in_one), _cut(_plain(other), at.in_other))


def _cut(text: str, parts_at: int) -> str:
    """A text, or what of it stands around the place where it parts from another."""
    if len(text) <= SHOWN:
        return text
    begin = max(0, min(parts_at - _BEFORE_DIFFERENCE, len(text) - SHOWN))
    return f"...{text[begin + 3 : begin + SHOWN]}" if begin else text[:SHOWN]


def _bounded(text: str) -> str:
    """What can travel: valid text of limited length. A long one becomes one mark, whose kind is the digest of the text
    without own ids, around its beginning and the digest of the text as it was: nodes agree when either is the same."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if len(text) <= MAX_TEXT:
        return text
    written = _plain(text)
    beginning = written[: MAX_TEXT - 100].translate({ord("{"): "(", ord("}"): ")"})
    kind = _short_digest(_MARK.sub(lambda mark: "{}" if _is_surely_own(mark) else mark["raw"], text))
    return f"{{long-{kind}:{beginning}... ({len(written)} characters, digest {_short_digest(written)})}}"


def _is_surely_own(mark: re.Match[str]) -> bool:
    """Whether a mark is hardly a coincidence: in a list of a thousand files some numbers look like somebody's ids."""
    return "node" in mark["kinds"] or (len(mark["raw"]) > 3 and not mark["kinds"].startswith("pid"))


def _plain(text: str) -> str:
    """An entry as it was written, without marks."""
    return _MARK.sub(lambda mark: mark["raw"], text)


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
