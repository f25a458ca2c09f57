"""Pure geometry: manifest, codecs, topology check, plan and bind. Imports numpy and msgspec only."""
