"""The two halves of a hand-off at instance level. No I/O, no clock: events in (times passed along), actions out."""
