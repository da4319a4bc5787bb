"""The peer machines: who may talk to whom, on which terms, on which stream. No I/O, no clock."""
