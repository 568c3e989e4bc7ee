"""Nouns of the field: records, versions, errors, ids, clock, random streams, settings. Standard library and numpy."""
