"""The logical half: requests, block ids, token counts, leases. One per engine, in the scheduler's process.

Never here: a stride, a layout, a transport, a tensor.
"""
