"""`isthmus bench`: requests at random times against a running cluster, and what they took."""
