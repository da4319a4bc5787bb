"""What every Isthmus service shares: configuration, identity, channels and servers, tracing, logs. Torch-free."""
