"""Entry points: python -m forge_async.apps.NAME."""
