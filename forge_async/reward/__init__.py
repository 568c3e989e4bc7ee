"""From turns to numbers: reward functions, worker processes with deadlines, advantages, filters."""
