"""Live copies of environments that can be stepped, snapshotted and forked."""
