"""The hub of an engine that no service starts: python -m kvtransfer.sidecar OPTIONS -- COMMAND OF THE ENGINE

It serves KvTransferService, runs the command as its child and lives as long as it.
"""
