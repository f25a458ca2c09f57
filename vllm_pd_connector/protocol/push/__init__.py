"""Pushes on the prefill side: who wants which prefill, what its workers are told to write, and how each gets on.

Here: the table (`table`), its parts, the queue of commands to the workers, a worker's part of a push (`push`). Never
here: writing, which is `worker.push`, or sockets, which are `sidechannel.push_service`.
"""
