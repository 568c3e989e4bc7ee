"""One heavy library each behind a room's port: vLLM, torchtitan, torchstore, transformers, reasoning-gym."""
