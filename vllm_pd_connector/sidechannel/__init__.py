"""The side channel: sockets that carry `protocol.messages` between a decode and a prefill instance."""
