"""What two instances say to each other, as messages and state machines without I/O; see docs/design/protocol.md.

Here: machines that get events and a clock and return actions (`peer`, `receive`, `lease`, `verification`). Never here:
a socket, a thread, a transport, vLLM, torch.
"""
