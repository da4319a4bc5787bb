"""Python client of Isthmus and the `isthmus` command."""

from isthmus_client.client import Answer, Client, End, Message, Model, Part, SyncClient, get_cluster
from isthmus_client.timeline import Handoff, Timeline

__all__ = [
    "Answer",
    "Client",
    "End",
    "Handoff",
    "Message",
    "Model",
    "Part",
    "SyncClient",
    "Timeline",
    "get_cluster",
]
