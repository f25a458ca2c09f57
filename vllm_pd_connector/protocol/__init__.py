"""What two instances say to each other, as messages and state machines without I/O; see docs/design/protocol.md."""
