"""Pushes on the prefill side: who wants which prefill, and what its workers are told to write.

Here: the table (`table`), its parts, and the queue of commands to the workers. Never here: writing, which is
`worker.push`, or sockets, which are `sidechannel.push_service`.
"""
