"""The border: protobuf to frozen dataclass and back. With the gRPC driver the only importer of `*_pb2`.

`X_to_pb` never fails on values the dataclasses accept; `X_from_pb` and `X_from_bytes` raise WireError naming the field.
Unknown enum values and unknown oneof bodies are refused, counts and sizes are limited, lists of numbers are one numpy
view over the bytes.
"""

from kvtransfer.wire.common import (
    incompatibilities_from_pb,
    incompatibilities_to_pb,
    key_from_pb,
    key_to_pb,
    notice_from_pb,
    notice_to_pb,
    tokens_from_pb,
    tokens_to_pb,
    trace_from_pb,
    trace_to_pb,
)
from kvtransfer.wire.envelope import (
    envelope_from_pb,
    envelope_from_request_bytes,
    envelope_to_request,
    envelope_to_response,
    session_view_from_pb,
    session_view_to_pb,
)
from kvtransfer.wire.geometry import (
    instance_info_from_pb,
    instance_info_to_pb,
    model_from_pb,
    model_to_pb,
    page_table_from_pb,
    page_table_to_pb,
    rank_info_from_pb,
    rank_info_to_pb,
)
from kvtransfer.wire.peer import peer_message_from_pb, peer_message_to_pb
from kvtransfer.wire.rank import (
    rank_input_from_bytes,
    rank_input_to_bytes,
    rank_output_from_bytes,
    rank_output_to_bytes,
)
from kvtransfer.wire.scheduler import (
    cancel_transfer_from_pb,
    cancel_transfer_to_pb,
    handoff_report_from_pb,
    handoff_report_to_pb,
    receive_outcome_from_pb,
    receive_outcome_to_pb,
    receive_request_from_pb,
    receive_request_to_pb,
    send_offer_from_pb,
    send_offer_to_pb,
    send_outcome_from_pb,
    send_outcome_to_pb,
)

__all__ = [
    "cancel_transfer_from_pb",
    "cancel_transfer_to_pb",
    "envelope_from_pb",
    "envelope_from_request_bytes",
    "envelope_to_request",
    "envelope_to_response",
    "handoff_report_from_pb",
    "handoff_report_to_pb",
    "incompatibilities_from_pb",
    "incompatibilities_to_pb",
    "instance_info_from_pb",
    "instance_info_to_pb",
    "key_from_pb",
    "key_to_pb",
    "model_from_pb",
    "model_to_pb",
    "notice_from_pb",
    "notice_to_pb",
    "page_table_from_pb",
    "page_table_to_pb",
    "peer_message_from_pb",
    "peer_message_to_pb",
    "rank_info_from_pb",
    "rank_info_to_pb",
    "rank_input_from_bytes",
    "rank_input_to_bytes",
    "rank_output_from_bytes",
    "rank_output_to_bytes",
    "receive_outcome_from_pb",
    "receive_outcome_to_pb",
    "receive_request_from_pb",
    "receive_request_to_pb",
    "send_offer_from_pb",
    "send_offer_to_pb",
    "send_outcome_from_pb",
    "send_outcome_to_pb",
    "session_view_from_pb",
    "session_view_to_pb",
    "tokens_from_pb",
    "tokens_to_pb",
    "trace_from_pb",
    "trace_to_pb",
]
