"""Leases as the scheduler half sees them: those of others that it keeps, and how much of its own pool they may take.
The rules of one lease are in `protocol.lease`."""
