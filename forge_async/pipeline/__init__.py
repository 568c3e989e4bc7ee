"""The only place where rooms meet: the loops of a run, and the run itself."""
