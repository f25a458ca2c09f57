"""Leases as the scheduler half sees them: those of others that it keeps, which of its own blocks are under one, and how
much of its own pool they may take. The rules of one lease are in `protocol.lease`."""
