"""The front door: tokenises, asks the coordinator for a placement, runs the legs of a request, streams text back."""
