"""The hub's part in hand-offs: what the worker's front process runs."""

from kvtransfer.control.generation import PairState, PairStatus, PeerAddress
from kvtransfer.hub.engine_status import EngineStatus
from kvtransfer.hub.estimates import PairEstimate
from kvtransfer.hub.transfer_hub import TransferHub

__all__ = ["EngineStatus", "PairEstimate", "PairState", "PairStatus", "PeerAddress", "TransferHub"]
