"""The side channel: sockets that carry `protocol.wire` between a decode and a prefill instance, and who may talk.

Here: server, client and what is built on them. Never here: what a message means, which is `protocol`.
"""
