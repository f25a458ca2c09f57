"""Conversations: what decode keeps of a turn (`lending`), and how prefill goes on with it in the next one (`turns`).

Requests, leases and blocks themselves are above, in `consumer` and `producer`.
"""
