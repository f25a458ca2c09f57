"""Where runs would be short: long runs to and from a staging buffer, and strided copies beside it, as plain data.

Here: what to read, write and copy. Never here: doing it, which is `worker.staging`.
"""
