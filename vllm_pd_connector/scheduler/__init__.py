"""The logical half: requests, block ids, token counts, leases. It never sees a stride, a layout or a transport."""
