"""Where prompts come from: sources with a resumable cursor, mixing, chat rendering to token ids."""
