"""The wire contract keeps its own rules. Reads descriptors and the text of the .proto files; needs no buf."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from nvrx.v1 import common_pb2, heartbeat_pb2, join_pb2, promote_pb2, rank_map_pb2, run_pb2, store_pb2
from tests import protos_fresh

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (common_pb2, heartbeat_pb2, join_pb2, promote_pb2, rank_map_pb2, run_pb2, store_pb2)
]
SOURCES = sorted((protos_fresh.ROOT / "protos").rglob("*.proto"))
RPCS = {
    "JoinService": ["Join", "Leave"],
    "HeartbeatService": ["Heartbeat"],
    "RankMapService": ["GetRankMap", "ListCycles", "LookupRank", "WatchRankMap"],
    "PromoteService": ["Promote", "Drain", "Undrain", "StopRun"],
    "RunService": ["GetRun", "ListRuns", "ListNodes", "ListFacts", "WatchFacts"],
    "StoreService": ["Get", "Set", "Add", "CompareSet", "Wait", "Delete", "ListKeys"],
}
# What needs a comment: the first word of its line, or a field or enum value (`... name = 1;`).
DECLARATION = re.compile(r"^(service|rpc|message|enum|oneof)\s+\w+|^[\w.<>, ]+\s=\s-?\d+;$")
# Fields that are 64-bit on purpose: positions and sequences, and what torch or the user counts in 64 bits.
WIDE = {"revision", "from_revision", "term", "sequence", "acknowledged", "step", "amount", "value"}


def messages() -> Iterator[Descriptor]:
    for file in FILES:
        yield from file.message_types_by_name.values()


def fields() -> Iterator[FieldDescriptor]:
    for message in messages():
        yield from message.fields


def enums() -> Iterator[EnumDescriptor]:
    for file in FILES:
        yield from file.enum_types_by_name.values()


def uncommented(text: str) -> list[str]:
    """Returns the declarations in `text` that no comment line stands above."""
    found = []
    before = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if DECLARATION.match(line) and not before.startswith("//"):
            found.append(f"{number}: {line}")
        before = line
    return found


def comment_above(lines: list[str], index: int) -> str:
    """Returns the comment block that ends just above line `index`."""
    start = index
    while start > 0 and lines[start - 1].strip().startswith("//"):
        start -= 1
    return "\n".join(line.strip() for line in lines[start:index])


def test_every_source_was_looked_at() -> None:
    assert [path.relative_to(protos_fresh.ROOT / "protos").as_posix() for path in SOURCES] == sorted(
        file.name for file in FILES
    )


def test_services_have_the_promised_rpcs() -> None:
    found = {
        name: [method.name for method in service.methods]
        for file in FILES
        for name, service in file.services_by_name.items()
    }
    assert found == RPCS


def test_every_rpc_has_its_own_request_and_response() -> None:
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                assert method.input_type.full_name == f"nvrx.v1.{method.name}Request"
                assert method.output_type.full_name == f"nvrx.v1.{method.name}Response"


def test_every_enum_starts_with_unspecified_and_has_its_prefix() -> None:
    for enum in enums():
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


def test_only_revisions_and_sequences_are_64_bit() -> None:
    wide = {field.name for field in fields() if field.cpp_type == FieldDescriptor.CPPTYPE_INT64}
    assert wide == WIDE


def test_unsigned_and_floating_numbers_are_not_used() -> None:
    allowed = {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_BOOL,
        FieldDescriptor.CPPTYPE_ENUM,
        FieldDescriptor.CPPTYPE_STRING,
        FieldDescriptor.CPPTYPE_MESSAGE,
    }
    assert {field.full_name for field in fields() if field.cpp_type not in allowed} == set()


def test_ranks_cycles_and_exit_codes_have_presence() -> None:
    names = ("cycle", "rank", "exit_code", "numa_node")
    without = [
        field.full_name
        for field in fields()
        if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 and field.name.endswith(names) and not field.has_presence
    ]
    assert without == []


def test_every_list_is_paged() -> None:
    for message in messages():
        if message.name.startswith("List") and message.name.endswith("Request"):
            assert {"page_size", "page_token"} <= set(message.fields_by_name)
        if message.name.startswith("List") and message.name.endswith("Response"):
            assert "next_page_token" in message.fields_by_name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_everything_has_a_comment(path: Path) -> None:
    assert uncommented(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_comments_name_errors_and_repetition(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        if line.strip().startswith("rpc "):
            assert "Errors:" in comment_above(lines, index), line
        if line.strip().startswith("repeated "):
            assert "May be repeated." in comment_above(lines, index), line


def test_a_missing_comment_is_found() -> None:
    text = """\
// Says hello.
service S {
  rpc A(ARequest) returns (AResponse);
}
// Asks.
message ARequest {
  // Named.
  string a = 1;
  repeated string b = 2;
  map<string, string> c = 3;
  oneof d {
    // Named.
    nvrx.v1.E e = 4;
  }
}

message AResponse {}
enum E {
  E_UNSPECIFIED = 0;
}
"""
    assert uncommented(text) == [
        "3: rpc A(ARequest) returns (AResponse);",
        "9: repeated string b = 2;",
        "10: map<string, string> c = 3;",
        "11: oneof d {",
        "17: message AResponse {}",
        "18: enum E {",
        "19: E_UNSPECIFIED = 0;",
    ]


def test_generated_code_is_fresh() -> None:
    if not protos_fresh.COMPILER.exists():
        missing = ".venv-protos is missing: `make protos` installs the compiler"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    assert protos_fresh.stale_files() == [], "run `make protos`"
