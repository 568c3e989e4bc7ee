"""From a prompt to finished turns: environments, the turn loop, groups, turns to samples."""
