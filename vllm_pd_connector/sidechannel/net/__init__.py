"""Connections: how they are dialled, named, encrypted, bounded in bytes and time, and waited for.

Here: sockets and keys. Never here: a message, or who asks whom.
"""
