"""The commands of `isthmus`, a module for each group; `isthmus_client.cli` puts them together."""
