"""Messages as JSON: field names as in the .proto, zero values printed."""

from __future__ import annotations

from google.protobuf import json_format
from google.protobuf.message import Message


def to_json(message: Message) -> str:
    """A message as indented JSON."""
    return json_format.MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=2
    )
