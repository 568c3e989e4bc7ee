"""Composes the rooms' settings; loads, checks and explains a configuration."""
