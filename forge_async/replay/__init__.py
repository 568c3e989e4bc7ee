"""Bounded depth and age: the ledger, the staleness bound, order, buffer and journal."""
