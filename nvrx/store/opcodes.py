"""The commands of torch's TCPStore protocol and the limits on them: names and numbers, nothing else.

Little-endian over TCP, without framing: an opcode byte, then its fields as GRAMMAR says. Commands follow one another;
replies come in their order, except that WAIT and BARRIER answer once they are fulfilled. The names are those of
`QueryType` in torch's header, confirmed against torch 2.13.
"""

from __future__ import annotations

import enum

MAGIC = 0x3C85F7CE
"""What VALIDATE carries: the first command on every connection, once."""

MAX_KEY_BYTES = 8 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024
"""Keys in one CHECK, WAIT, MULTI_GET or MULTI_SET. These three limits are torch's own."""

MAX_COMMAND_BYTES = 64 * 1024 * 1024
MAX_APPENDED_BYTES = 64 * 1024 * 1024
MAX_REPLY_BYTES = 256 * 1024 * 1024
MAX_SPACE_BYTES = 1024 * 1024 * 1024
"""Keys, values and queues of one key space together. These four are ours: torch bounds none of them."""


class Opcode(enum.IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class Kind(enum.Enum):
    """How a field is written. KEYS and PAIRS begin with a u64 count of their keys, or keys and values."""

    U32 = "u32"
    I64 = "i64"
    KEY = "u64 length, bytes; at most MAX_KEY_BYTES"
    VALUE = "u64 length, bytes; at most MAX_VALUE_BYTES"
    KEYS = "u64 count, KEY each"
    PAIRS = "u64 count, KEY and VALUE each"


GRAMMAR: dict[Opcode, tuple[Kind, ...]] = {
    Opcode.VALIDATE: (Kind.U32,),
    Opcode.SET: (Kind.KEY, Kind.VALUE),
    Opcode.COMPARE_SET: (Kind.KEY, Kind.VALUE, Kind.VALUE),
    Opcode.GET: (Kind.KEY,),
    Opcode.ADD: (Kind.KEY, Kind.I64),
    Opcode.CHECK: (Kind.KEYS,),
    Opcode.WAIT: (Kind.KEYS,),
    Opcode.GETNUMKEYS: (),
    Opcode.DELETE_KEY: (Kind.KEY,),
    Opcode.APPEND: (Kind.KEY, Kind.VALUE),
    Opcode.MULTI_GET: (Kind.KEYS,),
    Opcode.MULTI_SET: (Kind.PAIRS,),
    Opcode.CANCEL_WAIT: (),
    Opcode.PING: (Kind.U32,),
    Opcode.QUEUE_PUSH: (Kind.KEY, Kind.VALUE),
    Opcode.QUEUE_POP: (Kind.KEY,),
    Opcode.QUEUE_LEN: (Kind.KEY,),
    Opcode.LIST_KEYS: (),
    Opcode.BARRIER: (Kind.KEY, Kind.I64),
}

# What CHECK answers.
READY, NOT_READY = b"\0", b"\1"
# What WAIT, BARRIER and CANCEL_WAIT answer.
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
