"""Which bytes must move: manifest, topology check, plan and bind, as pure functions.

Here: what one worker has (`manifest`, `validate`), what must move between two ranks (`topology`, `sharding`, `plan`),
which bytes that is for one request (`blocks`, `bind`, `runs`), and what a pair would do (`explain`). Never here: vLLM,
torch, a transport, a socket, a clock; numpy and msgspec are all that is imported.
"""
