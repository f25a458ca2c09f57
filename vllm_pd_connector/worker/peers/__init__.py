"""Other instances as this worker knows them: links, their handshakes, doubts and deaths, and which way is faster.

Never here: a request. What is asked of a link is `worker.receive` and `worker.push`.
"""
