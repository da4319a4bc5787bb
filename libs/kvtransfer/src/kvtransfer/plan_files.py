"""`python -m kvtransfer.plan_files MINE YOURS [--tokens N]`: the plan of a hand-off between two instances that need not
run. The files hold what `KvTransferService.GetInstanceInfo` answers, as JSON (grpcurl prints it).

stdout: a `PlanTransferResponse` as JSON, whether the two can work together or not. Exit codes: 0 done, 2 a file can not
be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson, Parse, ParseError
from isthmus.v1 import kv_transfer_service_pb2

from isthmus_core.errors import ConfigError
from kvtransfer.dry_run import dry_run
from kvtransfer.errors import WireError
from kvtransfer.wire import instance_info_from_pb
from kvtransfer.wire.tools import plan_to_pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.rank_info import InstanceInfo


def read_instance(path: Path) -> InstanceInfo:
    """The instance that a file describes. Raises ConfigError naming the file and the field."""
    try:
        answer = Parse(path.read_text(), kv_transfer_service_pb2.GetInstanceInfoResponse())
        return instance_info_from_pb(answer.instance)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ParseError, UnicodeDecodeError, WireError) as error:
        raise ConfigError(f"{path}: not what GetInstanceInfo answers ({error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvtransfer.plan_files", description="Plan a hand-off, offline.")
    parser.add_argument("mine", type=Path, metavar="MINE", help="JSON of one instance")
    parser.add_argument("yours", type=Path, metavar="YOURS", help="JSON of the other one")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="length of the prompt")
    arguments = parser.parse_args(argv)
    try:
        mine, yours = read_instance(arguments.mine), read_instance(arguments.yours)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    answer = plan_to_pb(dry_run(mine, yours, arguments.tokens, lambda src, dst: None))
    print(MessageToJson(answer, preserving_proto_field_name=True, indent=None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
