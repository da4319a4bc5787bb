"""Python client of Isthmus and the `isthmus` command."""

from isthmus_client.client import Client, Model, get_cluster
from isthmus_client.generation import Answer, End, Logprobs, Message, Part, Tool, ToolCall
from isthmus_client.sync_client import SyncClient
from isthmus_client.timeline import Handoff, Timeline

__all__ = [
    "Answer",
    "Client",
    "End",
    "Handoff",
    "Logprobs",
    "Message",
    "Model",
    "Part",
    "SyncClient",
    "Timeline",
    "Tool",
    "ToolCall",
    "get_cluster",
]
