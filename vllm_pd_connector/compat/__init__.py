"""The only package that knows vLLM's versions and its unstable names.

Everything here is a thin, named view of something in vLLM; the rest of the connector imports these names. When a
vLLM release moves or renames something, the change is here. `docs/design/contract.md` lists what is relied on.
"""
