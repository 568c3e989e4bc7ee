"""From samples to gradients: packing, micro-batches, importance ratios, losses, the step."""
