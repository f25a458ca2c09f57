"""The physical half, one per rank: manifest, transfer thread, links, transfers.

Here: what vLLM's model runner calls (`half`), the transfer thread (`transfer_loop`) and what all of its parts use.
Never here: scheduling, or which tokens a request has.
"""
