"""Engine-agnostic KV-cache transfer: geometry, planning, agents, sessions, transceiver.

Knows nothing of the services.
"""
