"""Numbers over cache contents that do not depend on layout, block size or parallel sizes.

Here: digests per token for tests (`digest`) and one number per head for `verify` (`sums`). Never here: asking another
instance for its own, which is `protocol.verification` and `worker.receive.compare`.
"""
