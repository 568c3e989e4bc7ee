"""Where actors run: meshes and placement, jobs, wiring."""
