"""From a gradient to its readers: versions, manifests, publish, pull, fingerprints."""
